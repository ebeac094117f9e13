"""Imports that are postponed until an unknown name is looked up."""

from __future__ import annotations

from collections.abc import Callable

_waiting: list[Callable[[], object]] = []


def import_later(load: Callable[[], object]) -> None:
    """Postpone the import of a package that registers names; the import runs before an unknown name is refused."""
    _waiting.append(load)


def import_waiting() -> None:
    """Run all postponed imports, each once."""
    while _waiting:
        _waiting.pop(0)()
