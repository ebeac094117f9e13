"""Compare what lies between the quantizers of a file with torch, each part from the values that the file had there.

Sums in another order differ by rounding, and a quantizer makes a step of that where a value lies between two codes.
After some layers a right file is as far from torch as quantization is. So torch runs with the results that the
quantizers have in the file. What the next quantizers receive then differs by rounding alone, as the outputs do.

How much rounding explains is measured where that is asked: torch runs again, and the last bits of the results of all
its operations are changed at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fakequant.data.again import state_before
from fakequant.export.inputs import names_read
from fakequant.export.verification.check import SiteCheck
from fakequant.export.verification.verdict import Span
from fakequant.model.engine import simulated
from fakequant.model.weights import evaluating, exact_products
from fakequant.nn.quantized.recurrent import runs_backwards
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.nn.ranges import ByValue, call_again
from fakequant.ops.graph_operators import seen_as_operators
from fakequant.restore import forwards_of, restore_after

if TYPE_CHECKING:
    from onnx import ModelProto

Run = Callable[[Callable[[Tensor], Tensor]], Any]
"""Calls the model with a batch whose tensors go through a function."""
Values = Iterator[tuple[dict[str, Tensor], list[int]]]
"""The tensors of a file by name, and the indices of the checks whose tensors are among them."""

_UNITS = 8
"""Units of the last place of the largest value by which a right file may differ without a second look."""
_FACTOR = 32
"""How much more than by its last bits a right file may differ: sums of thousands of terms in another order."""
_ALIKE = 1e-3
"""Up to this share of the largest value a call of the model counts as that of a quantizer in the file."""
_HUGE = 2.0**100
"""From here on values are masks, which measure no others."""
_FAKE_QUANTIZE = torch.ops.fakequant.fake_quantize.default


class Spans:
    """Runs a model with the outputs of a file's quantizers, and compares the inputs of the quantizers.

    The last outputs are the new values of the buffers `state`.
    """

    def __init__(
        self, file: ModelProto, checks: Sequence[SiteCheck], model: nn.Module, state: Sequence[str] = ()
    ) -> None:
        self.checks, self.model, self.state = checks, model, state
        self._file = file
        self.of_checks = [Span(one.record.quantizer) for one in checks]
        self.of_outputs = {output.name: Span(output.name) for output in file.graph.output}
        modules = dict(model.named_modules(remove_duplicate=False))
        self.order: dict[nn.Module, list[int]] = {}
        for index, check in enumerate(checks):
            module = modules[check.record.quantizer]
            is_weight = isinstance(module, Quantizer) and module.kind is Kind.WEIGHT
            if check.record.codes is None or check.is_computed or not is_weight:
                self.order.setdefault(module, []).append(index)

    def found(self) -> list[Span]:
        """What was compared, in the order of the file.

        Raises:
            VerificationError: the model has not computed a weight of the file.
        """
        for check in self.checks:
            check.check_called()
        names = [*(check.record.x for check in self.checks), *self.of_outputs]
        spans = [*self.of_checks, *self.of_outputs.values()]
        ends = {value.name: value.name for value in self._file.graph.input}
        ends |= {one.record.y: "" if one.record.codes else one.record.quantizer for one in self.checks}
        made_by = {output: node for node in self._file.graph.node for output in node.output}
        for name, span in zip(names, spans, strict=True):
            waiting, seen, after = [] if span.fits else [name], {name}, list[str]()
            while waiting:
                node = made_by.get(waiting.pop())
                for source in names_read([node]) - seen if node is not None else ():
                    seen.add(source)
                    if source in ends:
                        after += [ends[source]] if ends[source] else []
                    else:
                        waiting.append(source)
            span.after = sorted(after)
        return [span for span in spans if span.elements or span.missing]

    def add(self, run: Run, values: Callable[[], Values], bins: Mapping[ByValue, Tensor]) -> dict[str, Tensor]:
        """Compare one batch; returns the last tensors of the file, among them its outputs."""
        before = state_before(self.model)
        found = _Pass(self, values(), bins)
        last = found.run(run)
        # The model may call a quantizer whose result it does not use, or the file may lack a call.
        if loose := found.uneven():
            before()
            found = _Pass(self, values(), bins, loose=loose)
            found.run(run)
            for index in found.left(loose):
                self.of_checks[index].missing = True
        moved: dict[int, float] = {}
        if found.suspects:
            with restore_after(state_before(self.model)):
                before()
                again = _Pass(self, values(), bins, loose=loose, ours=found.suspects)
                again.run(run)
            moved = again.moved
        for place, (span, elements, difference, largest, unit) in enumerate(found.compared):
            span.elements += elements
            span.add(difference, largest, max(_UNITS * unit * largest, _FACTOR * moved.get(place, 0.0)))
        return last


class _Pass:
    """One run of the model beside one of the file.

    Args:
        spans: of the file.
        values: of the file.
        bins: which ranges the batch chooses by its values.
        loose: modules whose calls are not all in the file, or not all in the model.
        ours: what torch had where an earlier run found too large differences; then last bits are changed.
    """

    def __init__(
        self,
        spans: Spans,
        values: Values,
        bins: Mapping[ByValue, Tensor],
        loose: frozenset[nn.Module] = frozenset(),
        ours: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._spans, self._values, self._bins, self._loose = spans, values, bins, loose
        self._ours, self._wobble = ours, None if ours is None else _Wobble()
        self._places: dict[nn.Module, tuple[int, int]] = dict.fromkeys(spans.order, (0, 0))
        self._ready: dict[int, tuple[Tensor, Tensor]] = {}
        self._last: dict[str, Tensor] = {}
        self._extra: set[nn.Module] = set()
        self._inside: list[nn.Module] = []
        self.compared: list[tuple[Span, int, float, float, float]] = []
        self.suspects: dict[int, Tensor] = {}
        self.moved: dict[int, float] = {}

    def run(self, run: Run) -> dict[str, Tensor]:
        """Run both to their ends and compare the outputs; returns the last tensors of the file."""
        model = self._spans.model
        with evaluating(model), simulated(model), torch.no_grad(), self._replaced(), exact_products():
            ours = outputs_of(model, run(self._moved), self._spans.state)
        while self._advance():
            pass
        for (name, span), x in zip(self._spans.of_outputs.items(), ours, strict=False):
            self._see(span, x, self._last[name])
        return self._last

    def uneven(self) -> frozenset[nn.Module]:
        """The modules that the model calls another number of times than the file has quantizers of them."""
        left = {one for one, (place, _) in self._places.items() if place < len(self._spans.order[one])}
        return frozenset(self._extra | left)

    def left(self, loose: frozenset[nn.Module]) -> list[int]:
        """The quantizers of the file that no call of the model was."""
        return [index for one in loose for index in self._spans.order[one][self._places[one][0] :]]

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """A context in which modules that quantize give the results of the file."""
        spans, wobble = self._spans, self._wobble

        def enclosed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._inside.append(module)  # which calls `fake_quantize` itself
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside.pop()

        def called(x: Tensor, own: Callable[[], Tensor]) -> Tensor:
            return self._result(self._inside[-1], x, own) if self._inside else own()

        def quantized(quantizer: Quantizer, x: Tensor) -> Tensor:
            with _disable_current_modes():
                own = partial(type(quantizer).forward, quantizer, x)
                # Of one that has parameters alone torch's, which the file has bit for bit.
                return self._result(quantizer, x, own) if quantizer in spans.order else self._moved(own())

        has_functions = any(not isinstance(module, Quantizer) for module in spans.order)
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for module in (*spans.order, *quantizers(spans.model).values()):
            if not isinstance(module, Quantizer):
                forwards[module] = partial(enclosed, module, module.forward)
            elif module in spans.order or wobble is not None or has_functions:
                forwards[module] = partial(quantized, module)
        with restore_after(forwards_of(forwards)), ExitStack() as stack:
            for module, forward in forwards.items():
                vars(module)["forward"] = forward
            if wobble is not None or has_functions:
                stack.enter_context(seen_as_operators())
                stack.enter_context(_Watch(called, wobble))
            yield

    def _moved(self, x: Tensor) -> Tensor:
        return x if self._wobble is None else self._wobble.moved(x)

    def _result(self, module: nn.Module, x: Tensor, own: Callable[[], Tensor]) -> Tensor:
        """The result of the file for a call of a module, and torch's where the file has none."""
        order, (place, step) = self._spans.order[module], self._places[module]
        if place == len(order):
            self._extra.add(module)
            return own()
        with torch._C.DisableTorchFunction():
            check = self._spans.checks[order[place]]
            while order[place] not in self._ready:  # the file runs that far
                self._advance()
            (theirs, y), steps = self._ready[order[place]], 0
            if y.dim() == x.dim() + 1:  # the file holds the steps of a loop together
                steps = len(y)
                at = steps - 1 - step if runs_backwards(check.record.quantizer) else step
                theirs, y = theirs[at], y[at]
            if module in self._loose and check.record.codes is None:
                difference, largest = _difference(x, theirs)
                if not difference <= _ALIKE * largest:
                    return own()
            self._places[module] = (place, step + 1) if step + 1 < steps else (place + 1, 0)
            if step + 1 >= steps:
                self._ready.pop(order[place])
            if check.record.codes is None:
                self._see(self._spans.of_checks[order[place]], x, theirs)
            else:
                check.compare_weight(own(), y)
            return self._moved(y.to(x.device, x.dtype, copy=True)) if y.shape == x.shape else own()

    def _advance(self) -> bool:
        """Run the next piece of the file; False at its end."""
        found = next(self._values, None)
        if found is None:
            return False
        self._last, indices = found
        judges = self._ours is None and not self._loose
        with call_again(self._bins):
            for index in indices:
                check = self._spans.checks[index]
                if judges:
                    check.compare(self._last)
                self._ready[index] = check.tensors(self._last)
        return True

    def _see(self, span: Span, ours: Tensor, theirs: Tensor) -> None:
        """Compare a tensor of torch with that of the file, or measure how far it moved."""
        place = len(self.compared)
        difference, largest = _difference(ours, theirs)
        unit = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
        self.compared.append((span, ours.numel(), difference, largest, unit))
        if self._ours is not None:
            if (before := self._ours.get(place)) is not None:
                self.moved[place] = _difference(ours, before)[0]
        elif not difference <= _UNITS * unit * largest:
            self.suspects[place] = ours.detach().cpu().clone()


class _Wobble:
    """Changes the last bits of tensors at random. Whole numbers stay: counts, masks, zeros."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def moved(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or not x.numel() or x.layout is not torch.strided:
            return x
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            signs = torch.randint(0, 2, x.shape, generator=self._generator, device="cpu").to(x.device) * 2 - 1
            return torch.where(x == x.round(), x, x * (1 + signs * torch.finfo(x.dtype).eps).to(x.dtype))


class _Watch(TorchDispatchMode):
    """Sees the calls of `fake_quantize`, and changes last bits of the results of all operations."""

    def __init__(self, quantized: Callable[[Tensor, Callable[[], Tensor]], Tensor], wobble: _Wobble | None) -> None:
        super().__init__()
        self._quantized_by, self._wobble = quantized, wobble

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _FAKE_QUANTIZE:
            return self._quantized_by(args[0], lambda: func(*args, **kwargs))
        is_view = any(argument.alias_info is not None for argument in func._schema.arguments)
        if self._wobble is None or is_view or func.namespace != "aten":
            return func(*args, **kwargs)
        if torch.Tag.pointwise not in func.tags:  # sums, whose terms may cancel
            args, kwargs = pytree.tree_map_only(Tensor, self._wobble.moved, (args, kwargs))
        return pytree.tree_map_only(Tensor, self._wobble.moved, func(*args, **kwargs))


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, inf where their shapes differ, and the largest magnitude in them."""
    if ours.shape != theirs.shape:
        return math.inf, 1.0
    if not ours.numel():
        return 0.0, 0.0
    a, b = (x.detach().cpu().double() for x in (ours, theirs))
    same = (a == b) | (a.isnan() & b.isnan())
    sizes = torch.maximum(a.abs(), b.abs())
    largest = sizes.where(sizes < _HUGE, 0.0).max().item()
    return (a - b).abs().nan_to_num(math.inf).where(~same, 0.0).max().item(), largest


def outputs_of(model: nn.Module, result: Any, state: Sequence[str]) -> list[Tensor]:
    """What a file gives: the tensors of a model's result, and the buffers that the model has written."""
    found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return [*found, *(model.get_buffer(path).detach().clone() for path in state)]
