"""Results as text: tables, in which names from a model or a file cannot control the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


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
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    shown = [*names]
    ending = f"{'' if between == ', ' else between.rstrip()} and {len(shown) - most} {what}"
    return between.join(shown[:most]) + (ending if len(shown) > most else "")


def table(
    rows: Iterable[Sequence[str]], below: Iterable[str] = (), *, numbers: Collection[int] = (), line: bool = False
) -> str:
    """Rows in columns, and lines below them; control characters are escaped.

    Args:
        rows: the header first. Shorter ones do not widen the columns.
        below: lines of text.
        numbers: the columns that are aligned to the right.
        line: whether a line is drawn below the header, where it names a column.

    >>> print(table([["layer", "dB"], ["0", "31.5"], ["head", "9"]], numbers=[1]))
    layer    dB
    0      31.5
    head      9
    """
    shown = [[*map(visible, row)] for row in rows]
    full = [row for row in shown if len(row) == len(shown[0])]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    if line:
        shown.insert(1, ["-" * width if head else "" for head, width in zip(shown[0], widths, strict=True)])

    def aligned(row: Sequence[str]) -> str:
        cells = [c.rjust(w) if place in numbers else c.ljust(w) for place, (c, w) in enumerate(zip(row, widths))]  # noqa: B905
        return "  ".join(cells).rstrip()

    return "\n".join([*map(aligned, shown), *(visible(text, keep="\n") for text in below)])
