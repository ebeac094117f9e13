"""Rotate residual streams and heads by changes of the weights alone, so that a run has no more operations."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_float_model
from fakequant.data.batches import Batches, Forward, Inputs
from fakequant.errors import ConfigError, nearest
from fakequant.model.run.outputs import record
from fakequant.model.run.recorded import FunctionCall, ModuleCall, Recording, RunStep, Unreached, has
from fakequant.nn.functions import SITE_FUNCTIONS, Trait
from fakequant.nn.quantized.layers import is_convolution, is_linear, is_table, subtracts_mean, without_mean
from fakequant.nn.quantizer import has_no_hooks
from fakequant.nn.transforms import hadamard
from fakequant.ptq.channel_scales import OutputCheck
from fakequant.ptq.weights import shared_parameters
from fakequant.restore import restore_on_error, state_of_parts
from fakequant.text import listed, table


@dataclass(eq=False)
class Residual:
    """A residual stream: tensors with the same channels, each a sum of the results of some modules, the makers.

    Attributes:
        makers: linear layers, convolutions, embeddings and parameters whose results are added up.
        readers: linear layers that multiply the values, each with the normalisation before it or None.
        norms: the normalisations that read the values.
        read_by: other readers of the values, as text.
    """

    makers: dict[nn.Module | nn.Parameter, None] = field(default_factory=dict)
    readers: dict[nn.Module, nn.Module | None] = field(default_factory=dict)
    norms: dict[nn.Module, None] = field(default_factory=dict)
    read_by: list[str] = field(default_factory=list)


class Heads(NamedTuple):
    """The layer that makes the values (V) of an attention, and the layer that reads the results of its heads."""

    maker: Any
    reader: Any
    size: int
    """Channels of a head."""


class Streams(NamedTuple):
    """The residual streams and heads of a run."""

    residuals: list[Residual]
    heads: list[Heads]


def follow(model: nn.Module, recording: Recording) -> Streams:
    """Find residual streams and heads: follow the results of linear layers, convolutions, embeddings and parameters.

    >>> from fakequant.model.run.outputs import record
    >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), torch.ones(1, 4)
    >>> found = follow(model, record(model, lambda: model(x)))
    >>> [len(one.readers) for one in found.residuals]
    [1]
    """
    walk = _StreamWalk(model, recording)
    for step, one in recording.steps():
        walk.call(one) if step is RunStep.CALL else walk.module(one, entered=step is RunStep.ENTER)
    for value in recording.outputs:
        walk.read(value, "the model's output")
    found = list(dict.fromkeys(walk.root(group) for group in walk.groups))
    uses = Counter(layer for one in walk.heads for layer in (one.maker, one.reader))
    heads = [one for one in walk.heads if one.maker not in walk.not_heads and uses[one.maker] == uses[one.reader] == 1]
    return Streams([one for one in found if one.readers], heads)


class _Value(NamedTuple):
    """The residual stream that a tensor belongs to, the normalisation that it comes from, and its attention heads."""

    group: Residual
    norm: nn.Module | None = None
    maker: nn.Module | None = None
    """The layer that made the tensor, if attention may cut heads from it; else None."""
    head: int = 0
    """Channels of a head, if the tensor is the result of attention; else 0."""


class _StreamWalk:
    """Goes through a run, and notes which modules make and read each residual stream."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self.groups: list[Residual] = []
        self.heads: list[Heads] = []
        self.not_heads: set[nn.Module] = set()
        self._shapes: list[tuple[int, ...]] = [value.shape if value.is_float else () for value in recording.values]
        self._modules = dict(model.named_modules())
        self._parameters = {number: parameter for parameter, number in recording.numbers(model).items()}
        self._into: dict[Residual, Residual] = {}
        self._values: dict[int, _Value] = {}
        self._of: dict[nn.Module | nn.Parameter, Residual] = {}
        self._running = 0  # layers and normalisations

    def root(self, group: Residual) -> Residual:
        """The stream into which a stream was merged; without a merge, the stream itself."""
        while group in self._into:
            group = self._into[group]
        return group

    def read(self, value: int, what: str) -> None:
        """Record a reader that prevents the rotation of a value; `what` describes it."""
        if (known := self._values.get(value)) is not None:
            self.root(known.group).read_by.append(what)
            self._drop_heads(known)

    def module(self, one: ModuleCall, *, entered: bool) -> None:
        """Note the start or the end of a module's call."""
        module = self._modules[one.path]
        if not (_makes(module) or is_vector_norm(module)):
            return
        if entered:
            value = self._values.get(one.inputs[0]) if one.inputs else None
            if value is not None:
                group = self.root(value.group)
                if is_linear(module) and value.head and is_linear(value.maker):
                    self.heads.append(Heads(value.maker, module, value.head))
                elif is_linear(module):
                    if group.readers.get(module, value.norm) is not value.norm:
                        group.read_by.append(f"{one.path}, with and without a normalisation before it,")
                    group.readers[module] = value.norm
                    self._drop_heads(value)
                elif is_vector_norm(module) and value.norm is None:
                    group.norms[module] = None
                    self._drop_heads(value)
                else:
                    self.read(one.inputs[0], one.path)
            for other in one.inputs[1:]:
                self.read(other, one.path)
            self._running += 1
            return
        self._running -= 1
        if one.output is None:
            return
        if _makes(module):
            self._values[one.output] = _Value(self._group_of(module), maker=module)
            return
        value = self._values.get(one.inputs[0]) if one.inputs else None
        if value is not None and value.norm is None:
            self._values[one.output] = _Value(value.group, norm=module)

    def call(self, call: FunctionCall) -> None:
        """Note the result of a function; calls within layers and normalisations are skipped."""
        if self._running:
            return
        name = call.function.partition(" ")[0]
        if has(name, Trait.SUMS) or has(name, Trait.CHANNELS):
            for value in call.inputs:
                if value in self._parameters and value not in self._values:
                    self._values[value] = _Value(self._group_of(self._parameters[value]))
        known = [value for value in call.inputs if value in self._values]
        if not known:
            return
        result = self._result(name, call, known) if len(call.outputs) == 1 else None
        if result is not None:
            self._values[call.outputs[0]] = result
            return
        for value in known:
            self.read(value, f"torch.{name}")

    def _result(self, name: str, call: FunctionCall, known: list[int]) -> _Value | None:
        """The `_Value` of a function's result; None if the function does not preserve rotations."""
        if has(name, Trait.CHANNELS):
            others = [value for value in call.inputs if value != known[0]]
            divides = name == "div" and "input" not in call.operands  # `1 / x`
            alone = len(known) == 1 and not divides and not any(self._shapes[value] for value in others)
            return self._values[known[0]] if alone else None
        if has(name, Trait.SUMS):
            added = [self._values[value] for value in known]
            groups = [self.root(value.group) for value in added]
            if len(known) < len(call.inputs) or any(value.norm is not None or value.head for value in added):
                return None
            first = groups[0]
            for other in groups[1:]:
                if other is not first:
                    self._into[other] = first
                    first.makers |= other.makers
                    first.readers |= other.readers
                    first.norms |= other.norms
                    first.read_by += other.read_by
            for value in added:
                self._drop_heads(value)
            return _Value(first)
        if not has(name, Trait.HEADS):
            return None
        values = {operand.name for operand in SITE_FUNCTIONS[name].operands if operand.reduction == -2}
        number = next((value for operand, value in call.operands.items() if operand in values), None)
        for one in known:
            if one != number:
                self.read(one, f"torch.{name}")
        value = None if number is None else self._values.get(number)
        if number is None or value is None or value.maker is None or value.head:
            return None
        self.root(value.group).read_by.append("attention")
        return value._replace(head=self._shapes[number][-1])

    def _group_of(self, maker: nn.Module | nn.Parameter) -> Residual:
        if maker not in self._of:
            self._of[maker] = Residual({maker: None})
            self.groups.append(self._of[maker])
        return self.root(self._of[maker])

    def _drop_heads(self, value: _Value) -> None:
        if value.maker is not None:
            self.not_heads.add(value.maker)


def _makes(module: nn.Module) -> bool:
    return is_linear(module) or is_table(module) or is_convolution(module)


def is_vector_norm(module: nn.Module) -> bool:
    """Whether a module may be a normalisation: it has a weight, no children, and only parameters [n] of one length."""
    held = [p for p in module._parameters.values() if p is not None]
    own = next(module.children(), None) is None and "weight" in module._parameters
    return own and bool(held) and all(p.dim() == 1 and p.shape == held[0].shape for p in held)


KINDS = ("hadamard", "random")
_SAME = 1e-4
"""The relative error up to which a normalisation commutes with rotations; its eps causes a small error."""


@dataclass(frozen=True)
class Rotated:
    """One row of `Rotations`: a residual stream or heads, rotated or not.

    Attributes:
        what: "residual stream" or "heads".
        width: the size of the rotation.
        makers: the paths of the layers and parameters that make the values.
        readers: the paths of the layers that multiply the values.
        note: why the values are not rotated; "" if they are.
    """

    what: str
    width: int
    makers: tuple[str, ...]
    readers: tuple[str, ...]
    note: str = ""


@dataclass
class Rotations:
    """The result of `rotate`; prints as a table."""

    rows: list[Rotated] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.rows:
            return "nothing to rotate: no torch.nn.Linear reads a residual stream or heads of attention"
        lines = [["values", "width", "made by", "read by", "what"]]
        for row in self.rows:
            made, read = listed(row.makers, 3), listed(row.readers, 3)
            lines.append([row.what, str(row.width), made, read, f"stays: {row.note}" if row.note else "rotated"])
        return table(lines)

    __repr__ = __str__  # what notebooks and consoles show


def rotate(
    model: nn.Module,
    batch: Any,
    *,
    kind: str = "hadamard",
    seed: int = 0,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
) -> Rotations:
    """Rotate the residual streams and the heads of attention of a float model, in place (QuaRot, arXiv 2404.00456).

    The weights of the layers that make the values are multiplied by an orthogonal matrix; the weights of the layers
    that read the values are multiplied by its inverse. The function of the model stays, as a run with the batch
    checks, and large channels are spread over all channels. One run finds the layers, by the identity of tensors. The
    weight and bias of a normalisation go into the layers behind it. A LayerNorm becomes a torch.nn.RMSNorm: the layers
    before it take over its subtraction of the mean.

    Args:
        model: a float model; call this before `prepare`.
        batch: one batch of a data loader.
        kind: "hadamard": a Hadamard matrix with random signs, times a random rotation if the width is not a power of
            two; or "random": a random rotation.
        seed: the seed of the random numbers.
        inputs, forward: as for `calibrate`. If the model also returns a cache of keys and values, let `forward` return
            the output alone: rotated heads change the cache.

    Raises:
        ConfigError: an unknown kind, or a model that is prepared or sharded, or whose output differs in a second run or
            is not finite.

    The model is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> print(rotate(model, torch.arange(9)))
    values           width  made by  read by  what
    residual stream  8      0        2        rotated
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind {kind!r}{nearest(str(kind), list(KINDS))}")
    check_float_model(model, "rotate", "rotate(model, batch)", "rotate")
    outputs = OutputCheck(model, Batches([batch], "rotate", inputs=inputs, forward=forward).kept())
    job = _Rotation(model, outputs, kind, seed)
    with restore_on_error(job.restore):
        return Rotations(job.rows())


class _Rotation:
    """Rotates the residual streams and heads of a model, and makes a row for each, with the reason if it stays."""

    def __init__(self, model: nn.Module, outputs: OutputCheck, kind: str, seed: int) -> None:
        recording = record(model, outputs.run)
        self._model, self._outputs, self._kind = model, outputs, kind
        self._generator = torch.Generator().manual_seed(seed)
        self._names: dict[Any, str] = {module: name or "(model)" for name, module in model.named_modules()}
        self._names |= {parameter: name for name, parameter in model.named_parameters()}
        self._shared, self._unreached = shared_parameters(model), Unreached(model, recording)
        self._found = follow(model, recording)
        touched = [part for one in self._found.heads for part in (one.maker, one.reader)]
        touched += [part for one in self._found.residuals for part in (*one.makers, *one.readers, *one.norms)]
        self.restore = state_of_parts(model, touched)

    def rows(self) -> list[Rotated]:
        """Rotate all streams and heads in place; returns their rows, the widest first."""
        rows = [self.heads(one) for one in self._found.heads] + [self.residual(one) for one in self._found.residuals]
        return sorted(rows, key=lambda row: -row.width)

    def residual(self, one: Residual) -> Rotated:
        """Rotate a residual stream (R1); returns its row."""
        width = cast("Any", next(iter(one.readers))).in_features
        why = self._why_not([*one.makers, *one.readers, *one.norms])
        if one.read_by:
            why = f"{one.read_by[0]} reads the values too"
        forms = {norm: form for norm in one.norms if (form := _form_of(norm, width)) is not None}
        if why is None and (unknown := [norm for norm in one.norms if norm not in forms]):
            why = f"{self._names[unknown[0]]} is neither a LayerNorm nor a normalisation by the root mean square"
        subtract = [subtracts_mean(norm) for norm in (*one.norms, *one.readers.values())]
        if why is None and len({*subtract}) > 1:
            why = "some of its readers subtract the mean and others do not"
        why = why or self._unreached.why_not(width)
        if why is None:
            touched = [*one.makers, *one.readers, *one.norms]
            why = self._try(touched, lambda: self._rotate(one, width, forms, centred=subtract[0]))
        return self._row("residual stream", width, [*one.makers], [*one.readers], why)

    def heads(self, one: Heads) -> Rotated:
        """Rotate the values of attention within each head (R2); returns its row."""
        why = self._why_not([one.maker, one.reader])
        if why is None and (one.maker.out_features % one.size or one.reader.in_features % one.size):
            why = "its heads are not next to each other"
        if why is None:

            def turn() -> None:
                made = _made_by([one.maker], one.maker.out_features)
                rotation = rotation_of(one.size, self._kind, self._generator)
                with torch.no_grad():
                    _turn([*made, (cast("nn.Parameter", one.reader.weight), 1)], rotation)

            why = self._try([one.maker, one.reader], turn)
        return self._row("heads", one.size, [one.maker], [one.reader], why)

    def _row(self, what: str, width: int, makers: list[Any], readers: list[Any], why: str | None) -> Rotated:
        names = [tuple(self._names[one] for one in ones) for ones in (makers, readers)]
        return Rotated(what, width, names[0], names[1], why or "")

    def _why_not(self, touched: list[nn.Module | nn.Parameter]) -> str | None:
        for one in touched:
            held = [one] if isinstance(one, nn.Parameter) else [p for p in one._parameters.values() if p is not None]
            if not self._shared.isdisjoint(held):
                return f"{self._names[one]} shares a parameter; give each layer a copy, for example untie the head"
            if isinstance(one, nn.Module) and (
                one._parameters.get("weight") is not one.weight or not has_no_hooks(one)
            ):
                return f"{self._names[one]} computes its weight, or has hooks"
        return None

    def _try(self, touched: list[nn.Module | nn.Parameter], change: Callable[[], None]) -> str | None:
        """Change the model. If its output changes, undo the change and return the reason; otherwise return None."""
        back = state_of_parts(self._model, touched)
        with restore_on_error(back):
            try:
                change()
            except _WidthError as error:
                why: str | None = f"{self._names[error.maker]} has other channels"
            else:
                why = self._outputs.why_not()
        if why is not None:
            back()
        return why

    @torch.no_grad()
    def _rotate(self, one: Residual, width: int, forms: dict[nn.Module, _Form], *, centred: bool) -> None:
        rotation = rotation_of(width, self._kind, self._generator)
        made = rotation - rotation.mean(0) if centred else rotation  # x @ made is (x - mean(x)) @ rotation
        _turn(_made_by(one.makers, width), made)
        for reader, norm in one.readers.items():
            if norm is not None and forms[norm].shift is not None:  # the shift goes into the bias of the reader
                layer = cast("Any", reader)
                bias = layer.weight.double() @ cast("Tensor", forms[norm].shift)
                if layer.bias is None:
                    layer.bias = nn.Parameter(bias.to(layer.weight.dtype))
                else:
                    layer.bias.copy_(layer.bias.double() + bias)
            read = rotation if norm is None else forms[norm].gain[:, None] * rotation.to(forms[norm].gain.device)
            _turn([(cast("nn.Parameter", reader.weight), 1)], read)
        for norm, form in forms.items():  # only the division by the root mean square stays
            if not subtracts_mean(norm):
                cast("nn.Parameter", norm.weight).data.fill_(form.plain)
                continue
            plain = without_mean(norm)
            for path in [path for path, own in self._model.named_modules(remove_duplicate=False) if own is norm]:
                self._model.set_submodule(path, plain)


def _turn(parameters: Iterable[tuple[nn.Parameter, int]], matrix: Tensor) -> None:
    """Multiply each parameter along its axis by a matrix, in blocks of the matrix's size; in float64, rounded once."""
    for parameter, axis in parameters:
        rows = parameter.detach().double().movedim(axis, -1).unflatten(-1, (-1, len(matrix)))
        turned = rows @ matrix.to(parameter.device)
        parameter.data.copy_(turned.flatten(-2).movedim(-1, axis))


class _WidthError(Exception):
    """The error for a module that makes values (a maker) with another number of channels than the rotation."""

    def __init__(self, maker: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.maker = maker


def rotation_of(width: int, kind: str, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix [width, width], float64.

    >>> matrix = rotation_of(6, "hadamard", torch.Generator().manual_seed(0))
    >>> bool(((matrix @ matrix.T) - torch.eye(6)).abs().max() < 1e-12)
    True
    """
    power = width & -width if kind == "hadamard" else 1
    rest = torch.randn(width // power, width // power, dtype=torch.float64, generator=generator, device="cpu")
    orthogonal, upper = torch.linalg.qr(rest)
    orthogonal *= upper.diagonal().sign()  # else QR's convention decides which rotations come
    signs = torch.randint(0, 2, (width,), generator=generator, device="cpu").double() * 2 - 1
    square = hadamard(power).double().sign() / power**0.5
    return signs[:, None] * torch.kron(orthogonal.contiguous(), square)


def _made_by(makers: Iterable[nn.Module | nn.Parameter], width: int) -> list[tuple[nn.Parameter, int]]:
    """Each parameter of the makers of a stream, with its axis of `width` channels; raises _WidthError for others."""
    found: list[tuple[nn.Parameter, int]] = []
    for maker in makers:
        if isinstance(maker, nn.Parameter):
            own = [(maker, maker.dim() - 1)]
        elif is_table(maker):
            own = [(cast("nn.Parameter", maker.weight), 1)]
        else:
            own = [(one, 0) for one in (maker.weight, maker.bias) if isinstance(one, nn.Parameter)]
        if any(axis < 0 or one.shape[axis] != width for one, axis in own):
            raise _WidthError(maker)
        found += own
    return found


class _Form(NamedTuple):
    """The gain and the shift that a normalisation applies to each channel of the normalised rows."""

    gain: Tensor
    """The factor of each channel, float64."""
    shift: Tensor | None
    plain: float
    """The value of the weight that multiplies by 1: it is 0 where the factor is 1 + weight."""


def _form_of(norm: nn.Module, width: int) -> _Form | None:
    """The gain and shift of a normalisation; None if its width is not `width`, or rotations do not commute with it.

    A LayerNorm commutes with rotations if the mean of its input is 0. Other classes are tried with random inputs.
    """
    weight, bias = cast("nn.Parameter", norm.weight), norm._parameters.get("bias")
    gain = weight.detach().double().clone()
    if subtracts_mean(norm):
        return (
            _Form(gain, None if bias is None else bias.detach().double().clone(), 1.0) if width == len(gain) else None
        )
    if bias is not None or len(weight) != width or norm._parameters.get("weight") is not weight:
        return None
    twin, generator = copy.deepcopy(norm).double(), torch.Generator().manual_seed(0)  # half precision differs by more
    own = cast("nn.Parameter", twin.weight)
    x, rotation = (
        torch.randn(64, width, generator=generator, device="cpu").to(own),
        rotation_of(width, "random", generator).to(own),
    )
    for plain in (1.0, 0.0):  # normalisations multiply by their weight, or by 1 + weight
        with torch.no_grad():
            own.fill_(plain)
            found, turned = twin(x).double(), twin(x @ rotation).double()
        is_unit = 0.5 < float(found.square().mean()) < 2  # twice the weight is 4 times the square
        if is_unit and float((turned - found @ rotation).norm()) <= _SAME * float(found.norm()):
            return _Form(gain + (1 - plain), None, plain)
    return None
