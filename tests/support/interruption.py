"""An interrupt at a line of the package, but those that restore, and what it leaves of a model."""

from __future__ import annotations

import copy
import dis
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import fakequant as fq

PACKAGE = str(Path(fq.__file__).parent)


class InterruptedForward:
    """A forward pass, for `forward=`, that is interrupted at its call with a number; it counts them from 1."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return model(batch)


@lru_cache
def _ends_of_blocks(code: CodeType) -> frozenset[int]:
    """Where a `with` statement is left without an error, in front of `__exit__`, and where `try` does nothing."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        one.offset
        for one, two in pairwise(steps)
        if one.opname == "NOP"
        or (
            (one.opname == "LOAD_CONST" and one.argval is None)
            and (two.opname == "DUP_TOP" or (two.opname == "LOAD_CONST" and two.argval is None))
        )
    )


def _restores(frame: FrameType | None) -> bool:
    """Whether a frame of the package, or what called it, restores or ends a `with` statement."""
    while frame is not None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE)
        if is_ours and (code.co_name in ("restore", "__exit__") or code.co_filename.endswith("restore.py")):
            return True
        frame = frame.f_back
    return False


class Lines:
    """The lines of the package that ran, each as (file and line, how often it had run); at most one raises.

    The ends of `with` statements and the word `try` do not count: no statement of the package restores from there.
    """

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.passed: list[tuple[str, int]] = []
        self.count = 0
        self.raised_at: tuple[str, int] | None = None

    def _call(self, frame: Any, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) and not _restores(frame) else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lasti not in _ends_of_blocks(frame.f_code):
            place = (frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno)
            if self.stop is None:
                self.passed.append(place)
            elif self.count == self.stop:
                self.raised_at = place
                sys.settrace(None)
                raise KeyboardInterrupt
            self.count += 1
        return self._line

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which the lines are counted."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)


class Case(NamedTuple):
    """A function to interrupt."""

    make: Callable[[], nn.Module]
    """The model that it gets."""
    call: Callable[[nn.Module], object]
    changes: bool = False
    """Whether the call changes the model: after an interrupt the model may then be changed, but completely."""
    trains: bool = False
    """Whether values of parameters and buffers, and whether ranges are learned, may be left in between."""


def state(model: nn.Module, *, identities: bool = True, values: bool = True) -> dict[str, Any]:
    """All that a model is: classes, attributes, hooks, modes, bits of its tensors; and what the process remembers."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            own = id(value) if identities and isinstance(value, nn.Parameter) else None
            data = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
            bits = bytes(data.tolist()) if values and not value.is_meta else None
            return own, value.dtype, value.device, tuple(value.shape), value.requires_grad, bits
        if isinstance(value, nn.Module):
            return type(value).__qualname__
        if isinstance(value, dict):
            return {str(key): of(inner) for key, inner in value.items()}
        if isinstance(value, (tuple, list)):
            return [of(inner) for inner in value]
        return repr(value) if isinstance(value, (bool, int, float, str, type(None), set)) else str(value)

    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = dict(vars(module))
        if not identities and isinstance(own.get("last_weight"), tuple):  # version, address, first bytes
            own["last_weight"] = own["last_weight"][0], own["last_weight"][2]
        if not identities:
            own.pop("_last_check", None)  # for which addresses codes were found to fit
        found[name] = (type(module), of(own))
    # Not whether gradients are on: the first line of `torch.no_grad().__exit__` is a window of torch's own.
    found["the process"] = (
        len(torch_optimizer._global_optimizer_post_hooks),
        len(torch_module._global_forward_hooks),
        len(torch_module._global_forward_pre_hooks),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._dynamo.eval_frame._stance,
        [logging.getLogger(log).level for log in ("torch.export", "torch.onnx", "onnxscript")],
    )
    return found


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two states differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in [*a, *(key for key in b if key not in a)]
            for line in (
                differences(a[key], b[key], f"{path}/{key}")
                if key in a and key in b
                else [f"{path}/{key}: in one only"]
            )
        ]
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return [line for x, y in zip(a, b, strict=True) for line in differences(x, y, path)]
    return [] if a == b else [f"{path}: {str(a)[:60]} became {str(b)[:60]}"]


def lines_of(case: Case) -> list[tuple[str, int]]:
    """The lines of the package that an uninterrupted call passes."""
    model, lines = copy.deepcopy(case.make()), Lines()
    case.call(copy.deepcopy(model))  # the first call fills caches
    with lines.watched():
        case.call(model)
    return lines.passed


def failures(case: Case, stops: Sequence[int]) -> list[str]:
    """What is wrong after an interrupt at each moment: nothing if the model is unchanged, or changed completely."""
    made = case.make()
    changed = copy.deepcopy(made)
    case.call(changed)
    wanted = state(changed, identities=False, values=not case.trains)
    found = []
    for stop in stops:
        model, lines = copy.deepcopy(made), Lines(stop)
        before = state(model, values=not case.trains)
        try:
            with torch.set_grad_enabled(True), lines.watched():
                case.call(model)
        except KeyboardInterrupt:
            pass
        place = f"{lines.raised_at[0]}:{lines.raised_at[1]}" if lines.raised_at else "not reached"
        if wrong := _left(case, model, before, wanted):
            found.append(f"interrupt {stop} at {place} left {len(wrong)} changes: {'; '.join(wrong[:3])}")
    return found


def _left(case: Case, model: nn.Module, before: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What an interrupt left of a change."""
    wrong = differences(before, state(model, values=not case.trains))
    if wrong and case.trains:
        wrong = [line for line in wrong if not _is_learned(line)]
    if wrong and case.changes and not differences(wanted, state(model, identities=False, values=not case.trains)):
        return []
    return wrong


def _is_learned(line: str) -> bool:
    """Whether a difference is that a range began to be learned, or that a layer in eval mode saw a trained weight."""
    parts = "_quantizer.lsq", "_method", "_modules/lsq", "_buffers/scale", "/fitted_to", "/last_weight"
    return any(part in line for part in parts)
