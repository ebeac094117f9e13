"""Results as text: tables, in which names from a model or a file cannot control the terminal."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from html import escape
from itertools import zip_longest
from textwrap import fill

_NARROW = 24
"""The least width in characters to which the widest column of a table is broken."""


def visible(text: str, keep: str = "") -> str:
    """Escape control characters, so that text from a file or a model cannot control the terminal.

    >>> visible("a\\x1b[2Jb\\n")
    'a\\\\x1b[2Jb\\\\n'

    Args:
        text: the text.
        keep: characters that are not escaped, such as line breaks.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def module_name(path: str) -> str:
    """The path of a module in a message; in tables the model itself is "(model)".

    >>> module_name("head"), module_name("")
    ('head', 'the model')
    """
    return path or "the model"


def listed(names: Iterable[str], most: int = 4, what: str = "more", *, between: str = ", ") -> str:
    """The first `most` names, joined by `between`, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    shown = [*names]
    ending = f"{'' if between == ', ' else between.rstrip()} and {len(shown) - most} {what}"
    return between.join(shown[:most]) + (ending if len(shown) > most else "")


LINE_WIDTH: ContextVar[int | None] = ContextVar("line width", default=None)
"""The most characters of a line of tables, and of text that is `fitted`; None for no limit."""


def fitted(text: str) -> str:
    """A text in lines of `LINE_WIDTH`, broken at spaces: words such as paths stay whole.

    >>> from fakequant.restore import set_to
    >>> with set_to(LINE_WIDTH, 12):
    ...     print(fitted("Written: /a/longer/path.onnx now"))
    Written:
    /a/longer/path.onnx
    now
    """
    width = LINE_WIDTH.get() or sys.maxsize
    broken = partial(fill, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if len(line) <= width else broken(line) for line in text.split("\n"))


def table(
    rows: Iterable[Sequence[str]],
    below: Iterable[str] = (),
    *,
    numbers: Collection[int] = (),
    line: bool = False,
    width: int | None = None,
) -> str:
    """A table as text: rows in columns, and lines below the table; control characters are escaped.

    In a table that is too wide, the widest column is broken at dots and spaces if the others leave it 24 characters;
    else columns are placed below one another.

    Args:
        rows: the rows, the header first. Rows with fewer cells than the header do not widen the columns.
        below: lines of text.
        numbers: the columns that are aligned to the right.
        line: whether to draw a line below the header, under the columns that have a name.
        width: the most characters of a line; on a terminal at most its width, in a file or pipe by default no limit;
            `LINE_WIDTH` is a limit, too.

    >>> print(table([["layer", "dB"], ["0", "31.5"], ["head", "9"]], numbers=[1]))
    layer    dB
    0      31.5
    head      9
    >>> print(table([["layer", "dB"], ["encoder.layers.0.attention.query", "31.5"]], numbers=[1], width=30))
    layer                       dB
    encoder.layers.0.         31.5
    attention.query
    """
    is_terminal = getattr(sys.stdout, "isatty", bool)()  # None and writers of users have none
    most = min(width or sys.maxsize, (is_terminal and shutil.get_terminal_size((0, 0)).columns) or sys.maxsize)
    most = min(most, LINE_WIDTH.get() or sys.maxsize)
    shown = [[*map(visible, row)] for row in rows]
    full = [row for row in shown if len(row) == len(shown[0])]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    left = most - sum(widths) - 2 * len(widths) + 2
    if left < 0 and max(widths) + left >= _NARROW:
        widths[widths.index(max(widths))] += left
    bands, used = [list[int]()], 0  # columns by lines; a wider column gets the width of a line
    for place, wanted in enumerate(widths):
        if bands[-1] and used + 2 + wanted > most:
            bands.append([])
            used = 0  # lines after the first are indented by 2
        widths[place] = min(wanted, most - 2 * (len(bands) > 1))
        used += 2 * (bool(bands[-1]) or len(bands) > 1) + widths[place]
        bands[-1].append(place)
    if line:
        shown.insert(1, ["-" * width if head else "" for head, width in zip(shown[0], widths, strict=True)])

    def aligned(row: Sequence[str]) -> Iterator[str]:
        if len(row) < len(widths):
            yield from _pieces("  ".join(map(str.ljust, row, widths)).rstrip(), most)
            return
        for number, band in enumerate(bands):
            cells = [_pieces(row[place], widths[place]) for place in band]
            for pieces in zip_longest(*cells, fillvalue=""):
                places = zip(band, pieces, strict=True)
                sides = [c.rjust(widths[at]) if at in numbers else c.ljust(widths[at]) for at, c in places]
                if text := "  ".join(sides).rstrip():
                    yield f"{'  ' * (number > 0)}{text}"

    texts = (piece for text in below for one in visible(text, keep="\n").split("\n") for piece in _pieces(one, most))
    return "\n".join([*(text for row in shown for text in aligned(row)), *texts])


def _pieces(text: str, width: int) -> list[str]:
    """A text in lines, broken after spaces, else after dots, else anywhere."""
    found = list[str]()
    while len(text) > width:
        cut = text.rfind(" ", 0, width + 1)
        cut = cut if cut > 0 else text.rfind(".", 0, width) + 1 or width
        found.append(text[:cut].rstrip())
        text = text[cut:].lstrip()
    return [*found, text]


_LONG = re.compile(r"\S{13,}")
"""A pattern of long words that may be broken."""
_BREAK = re.compile(r"(?<=[._])(?=\w)")


def breakable(text: str) -> str:
    """An HTML text in which long names, such as names of layers, may be broken after dots and underscores.

    >>> breakable("a.b: encoder.layer_0<")
    'a.b: encoder.<wbr>layer_<wbr>0&lt;'
    """
    return _LONG.sub(lambda word: _BREAK.sub("<wbr>", word.group()), escape(text))


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table of text; every cell is escaped.

    Args:
        numbers: the columns that are aligned to the right.

    >>> html_table(["a"], [["<1>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1&gt;</td></tr></tbody></table>'
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="number" style="text-align:right"' if index in numbers else "" for index in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"


def html_result(
    header: Sequence[str], rows: Iterable[Sequence[str]], lines: Iterable[str] = (), *, numbers: Sequence[int] = ()
) -> str:
    """A result for a notebook: a table that can be scrolled, then lines.

    >>> html_result(["a"], [], ["b"]).endswith("</div><p>b</p>")
    True
    """
    shown = html_table(header, rows, numbers=numbers)
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<div style="max-height:32em;overflow:auto">{shown}</div>{paragraphs}'
