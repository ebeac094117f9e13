"""Imports that wait until a name is asked for that is not registered yet."""

from __future__ import annotations

from collections.abc import Callable

_waiting: list[Callable[[], object]] = []


def import_later(load: Callable[[], object]) -> None:
    """Keep the import of a package that registers names; it runs before an unknown name is refused."""
    _waiting.append(load)


def import_waiting() -> None:
    """Run all imports that wait, each once."""
    while _waiting:
        _waiting.pop(0)()
