"""Record one run of a model: see `recorder`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.data.again import unchanged
from fakequant.errors import CoverageWarning, warn_user
from fakequant.model.modes import evaluating
from fakequant.model.run.memory import holds_mask, largest
from fakequant.model.run.outputs import float_tensors
from fakequant.model.run.recorded import EXTREME, OF_A_CACHE, QUANTIZER, WITHOUT_FLOATS, ModuleCall, Recording
from fakequant.model.run.recorder import PLAIN, Detail, Recorder, name_of, quantizes, tensors_in
from fakequant.model.run.traits import counted
from fakequant.nn.quantizer import Kind, Quantizer
from fakequant.nn.sites.functions import CalledAs, called_as
from fakequant.nn.sites.sites import operands_of, takes_floats
from fakequant.nn.sites.unseen import OF_CACHE, hide_caches
from fakequant.restore import forwards_of, restore_after
from fakequant.text import listed, module_name


def record(model: nn.Module, run: Callable[[], object], mode: Callable[..., Any] = evaluating) -> Recording:
    """Run a model in eval mode without gradients, and note what it calls; the model is as before.

    Args:
        model: a float model, or a prepared one, whose quantizers only mark what they return.
        run: calls it.
        mode: the context in which it runs; `evaluating` or `training`.

    >>> class Residual(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.relu(x)
    >>> model, x = nn.Sequential(Residual()), torch.ones(2, 4)
    >>> recording = record(model, lambda: model(x))
    >>> [(call.owner, call.function, sorted(call.operands)) for call in recording.calls]
    [('0', 'relu', ['input']), ('0', 'add', ['input', 'other'])]
    """
    hide_caches()
    recorder = _WholeRecorder(model)
    with (
        unchanged(model),
        mode(model),
        torch.no_grad(),
        recorder.recording_on(),
    ):
        result = run()
        recorder.recording.kept = recorder.tensors.numbers()
    if recorder.recording.threads:
        names = [module_name(path) for path in sorted(recorder.recording.threads)]
        warn_user(
            f"the model calls {listed(names, 3)} in threads of its own, where no function is seen: what they compute "
            "is in no list and gets no quantizers of functions. Give an example that runs in one thread",
            CoverageWarning,
        )
    returned = [*tensors_in(result), *float_tensors(result)]  # torch's trees end at a dataclass
    recorder.recording.outputs = tuple(dict.fromkeys(recorder.value_of(tensor) for tensor in returned))
    return recorder.recording


@contextmanager
def watching(model: nn.Module) -> Iterator[Recording]:
    """A context that fills a recording while a model runs as it is: quantizers run, and nothing is counted.

    >>> model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    >>> with watching(model) as found:
    ...     y = model(x)
    >>> [call.path for call in found.modules]
    ['', '0']
    """
    recorder = Recorder(model)
    with recorder.recording_on():
        yield recorder.recording


class _WholeRecorder(Recorder):
    """Also counts products, looks at numbers, finds what could be a site, and takes quantizers for marks."""

    def __init__(self, model: nn.Module) -> None:
        self.followed: CodeType | None = None
        self.ended: dict[str, ModuleCall] = {}
        """The last call of each module that its hooks have not seen."""
        super().__init__(model)

    @contextmanager
    def recording_on(self) -> Iterator[None]:
        """Calls belong to the module whose `forward` runs; those of hooks belong to none."""
        with restore_after(forwards_of(self.modules.values())):
            for path, module in self.modules.items():
                follow = self._quantized(module) if quantizes(module) else self._followed(path, module.forward)
                vars(module)["forward"] = follow
            with super().recording_on():
                yield

    def _hook(self, path: str, module: nn.Module, keep: Callable[[Any], None]) -> None:
        keep(module.register_forward_pre_hook(lambda *_: self._enter_hooks(), prepend=True))
        keep(module.register_forward_hook(lambda _, __, y: self._leave_hooks(path, y), always_call=True))

    def _enter_hooks(self) -> None:
        if self.is_here():
            self.running.append((None, 0))

    def _leave_hooks(self, path: str, result: Any) -> None:
        if self.is_here():
            self.running.pop()
            one = self.ended.pop(path, None)
            if one is not None and isinstance(result, Tensor):
                one.output = self.value_of(result)  # a hook may have given another one
                one.results = (one.output,)

    def _followed(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.enter(path, args, kwargs)
            result = None
            try:
                result = forward(*args, **kwargs)
                return result
            finally:
                if self.is_here():
                    self.ended[path] = self.open[-1]
                self.leave(result)

        self.followed = run.__code__  # type: ignore[attr-defined]  one code for all modules
        return run

    def _quantized(self, quantizer: Any) -> Callable[[Tensor], Tensor]:
        """A call of a quantizer, which gives a new value with the same numbers: it needs no range and no time."""

        def run(x: Tensor) -> Tensor:
            if not quantizer.quantizes:
                return x
            with torch._C.DisableTorchFunction():
                # The result may be written, that of a weight is not, and weights are large.
                is_weight = isinstance(quantizer, Quantizer) and quantizer.kind is Kind.WEIGHT
                result = x.detach() if is_weight else x.clone()
            if self.is_here():
                self._note(QUANTIZER, (self.value_of(x),), [result], 0, PLAIN)
            return result

        return run

    def _computed(self, product: str, run: Callable[[], Any], factors: list[Tensor]) -> tuple[Any, int]:
        return counted(product, run, factors) if factors else (run(), 0)

    def _size(self, tensor: Tensor, number: int) -> float:
        size = largest(tensor)
        if EXTREME <= size < math.inf and holds_mask(tensor, EXTREME):
            self.recording.masks.add(number)
        return size

    def _named(self, func: Any, args: Any, kwargs: Any) -> tuple[CalledAs | None, str]:
        called = called_as(func)
        if called is None:
            return None, name_of(func)
        if not takes_floats(args, kwargs):
            return None, called.function.name + WITHOUT_FLOATS  # as a prepared model, which does not count such calls
        if self._is_of_cache():
            return None, called.function.name + OF_A_CACHE
        return called, called.function.name

    def _detail(self, called: CalledAs, args: Any, kwargs: Any) -> Detail:
        operands = operands_of(called, args, kwargs)
        numbers = {operand: self.value_of(tensor) for operand, tensor in operands.items()}
        read = called.function.equation
        return Detail(numbers, self._where(), "" if read is None else read(args, kwargs))

    def _is_of_cache(self) -> bool:
        """Whether a cache of transformers makes the call."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code is not self.followed:
            if frame.f_code is OF_CACHE:
                return True
            frame = frame.f_back
        return False

    def _where(self) -> tuple[tuple[CodeType, int], ...]:
        """The places in the code that run, from the call of the function up to the `forward` of its owner."""
        places = []
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code is not self.followed:
            places.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return tuple(places)
