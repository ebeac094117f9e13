"""One row of docs/notes/bars.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """One promise: what is measured, what must hold, what was found."""

    what: str
    bar: str
    measured: str
    ok: bool


def at_most(what: str, value: float, limit: float, form: str = "{:.2f}") -> Bar:
    """A bar on the largest value allowed."""
    return Bar(what, f"<= {limit:g}", form.format(value), value <= limit)


def nothing_differs(what: str, count: int) -> Bar:
    """A bar of zero differing elements."""
    return Bar(what, "0 differing elements", f"{count:,}", count == 0)
