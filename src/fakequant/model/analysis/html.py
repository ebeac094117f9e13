"""Tables as HTML, for notebooks and for the report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_LONG = re.compile(r"\S{13,}")
"""Words that may break within themselves."""
_BREAK = re.compile(r"(?<=[._])(?=\w)")


def breakable(text: str) -> str:
    """Text, escaped, in which long names, such as those of layers, may break after dots and underscores.

    >>> breakable("a.b: encoder.layer_0<")
    'a.b: encoder.<wbr>layer_<wbr>0&lt;'
    """
    return _LONG.sub(lambda word: _BREAK.sub("<wbr>", word.group()), escape(text))


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table of text; every cell is escaped.

    Args:
        header: the names of the columns.
        rows: the cells of each row, as many as the header has.
        numbers: the columns that are aligned to the right.

    >>> html_table(["a"], [["<1>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1&gt;</td></tr></tbody></table>'
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="number" style="text-align:right"' if index in numbers else "" for index in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(lines: Iterable[str]) -> str:
    """Each line as a paragraph, escaped."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def html_result(
    header: Sequence[str], rows: Iterable[Sequence[str]], lines: Iterable[str] = (), *, numbers: Sequence[int] = ()
) -> str:
    """A result for a notebook: a table that scrolls in itself, then lines.

    >>> html_result(["a"], [], ["b"]).endswith("</div><p>b</p>")
    True
    """
    return f'<div style="max-height:32em;overflow:auto">{html_table(header, rows, numbers=numbers)}</div>' + html_lines(
        lines
    )
