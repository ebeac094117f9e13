"""Lines of the package that a call executes, by the code that holds them: work that can be compared without a clock."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fakequant

_PACKAGE = str(Path(fakequant.__file__).parent)


def lines_of(call: Callable[[], object]) -> Counter[str]:
    """How many lines of each function a call executes; each round of a loop or a comprehension counts.

    >>> lines_of(lambda: fakequant.QuantSpec("int8")).total() > 0
    True
    """
    found: Counter[Any] = Counter()

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            found[frame.f_code] += 1
        return line

    def called(frame: FrameType, *_: object) -> Any:
        return line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        call()
    finally:
        sys.settrace(before)
    named: Counter[str] = Counter()
    for code, count in found.items():
        named[f"{code.co_filename.removeprefix(_PACKAGE)}:{code.co_firstlineno} {code.co_name}"] += count
    return named
