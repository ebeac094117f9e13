"""The weights of a quantized model as codes: made when asked for, and a reason where a weight has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fakequant.distributed import is_sharded
from fakequant.errors import QParamsError, ShapeError
from fakequant.functional import dequantize
from fakequant.model.weights import quantized_weights
from fakequant.nn.paths import layer_of
from fakequant.nn.products.product import Product
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.numerics.format import Format
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library


@dataclass(frozen=True, eq=False)
class WeightCodes:
    """A weight as codes: all that is needed for its values.

    Attributes:
        codes: in the storage of the format, as `fakequant.quantize` gives them; in the shape of the weight.
        scale: one for each group, see `Granularity.group_shape`.
        zero_point: as the scale, int32; of a specification with an offset that, in units of x; None if it is symmetric.
        spec: how the weight is quantized.
        shape: that of the weight.
        dtype: that of the weight.
        quantizers: the paths of the quantizers that read the weight, all with this scale; () where it is not known.

    >>> spec = QuantSpec("int8", PerChannel(0))
    >>> codes, scale = torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[0.5]])
    >>> WeightCodes(codes, scale, None, spec, (1, 2), torch.float32).values()
    tensor([[ 0.5000, -1.0000]])
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    spec: QuantSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"WeightCodes({list(self.shape)}, {str(self.spec)!r}, {self.dtype})"

    def values(self) -> Tensor:
        """The values of the codes, in the shape and dtype of the weight."""
        groups = self.spec.granularity.group_shape(tuple(self.shape))
        zero_point = None if self.zero_point is None else self.zero_point.reshape(groups)
        if zero_point is not None and self.spec.offset is None:
            zero_point = zero_point.to(torch.int32)
        return dequantize(self.codes, QParams(self.scale.reshape(groups), zero_point), self.spec, dtype=self.dtype)

    def check(self) -> None:
        """Raise where the codes are none of the format, or of another shape; scales are checked by `apply`.

        Raises:
            ShapeError: codes of another shape.
            QParamsError: codes of another dtype, or that the format does not have; no codes or no scale.
        """
        format = self.spec.format
        if missing := [name for name in ("codes", "scale") if not isinstance(getattr(self, name), Tensor)]:
            raise QParamsError(f"have no {missing[0]}")
        if tuple(self.codes.shape) != tuple(self.shape):
            raise ShapeError(f"are of shape {list(self.codes.shape)}, but the weight of shape {list(self.shape)}")
        if self.codes.dtype is not format.storage:
            raise QParamsError(f"are {self.codes.dtype}, but {format} has {format.storage}")
        lowest, highest = map(int, patterns_of(self.codes, format).aminmax()) if self.codes.numel() else (0, 0)
        if lowest < 0 or highest >= count_of(format):
            raise QParamsError(f"hold {min(lowest, 0) or highest}, but {format} has {count_of(format)} codes")


def lowest_of(format: Format) -> int:
    """The lowest code of an integer format, which is subtracted so that patterns are not negative; else 0."""
    is_integer = format.grid.table is None and format.grid.mantissa_bits is None
    return int(format.quant_min) if is_integer else 0


def count_of(format: Format) -> int:
    """The number of patterns of a format."""
    if format.grid.table is not None:
        return len(format.grid.table.values)
    return int(format.quant_max - format.quant_min) + 1 if format.grid.mantissa_bits is None else 1 << format.bits


def patterns_of(codes: Tensor, format: Format) -> Tensor:
    """Codes as numbers from 0, int32: the patterns of their bits, of integers counted from the lowest code."""
    flat = codes
    if codes.dtype.is_floating_point:
        flat = codes.contiguous().view(torch.uint8 if codes.element_size() == 1 else torch.int16)
    # A float of 16 bits has its sign in that of the int16 that stores it: only its bits count.
    whole = flat.to(torch.int32) - lowest_of(format)
    return whole & (1 << format.bits) - 1 if format.grid.mantissa_bits is not None else whole


class QuantizedWeights(Mapping[str, WeightCodes]):
    """The codes of a model's weights by the name of the parameter, made at each access and not kept.

    A weight without scales yet gets those of its next call. The first access looks at all weights, one after the other,
    for those that codes do not give the same bits.

    Args:
        model: the prepared model.
        shared: tied names, each with the name of the first one.
    """

    def __init__(self, model: nn.Module, shared: Mapping[str, str]) -> None:
        weights = quantized_weights(model)
        by_parameter: dict[int, dict[str, Product]] = {}
        for path, weight in weights.items():
            by_parameter.setdefault(id(weight.parameter), {})[path] = weight
        names: dict[str, list[str]] = {}
        self._held: dict[str, dict[str, Product]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if held := by_parameter.get(id(parameter)):
                first = shared.get(name, name)
                self._held[first] = held
                names.setdefault(first, []).append(name)
        self._left = {
            f"{layer_of(path)}.{weight.name}".lstrip("."): "it is computed when the layer is called"
            for path, weight in by_parameter.get(id(None), {}).items()
        }
        self._left |= {
            path: "functions read it that have quantizers of their own, or it is computed"
            for path, quantizer in quantizers(model).items()
            if quantizer.kind is Kind.WEIGHT and path not in weights and quantizer.mode is Mode.QUANTIZE
        }
        self._left |= {
            name: "a layer without a quantizer reads it, too"
            for name, own in names.items()
            if len(self._held[name]) != len(own)
        }

    @cached_property
    def in_float(self) -> dict[str, str]:
        """The quantized weights that have no codes, each with the reason."""
        found = {name: self._left.get(name) or _reason(held) for name, held in self._held.items()}
        return {name: reason for name, reason in {**found, **self._left}.items() if reason}

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._held if name not in self.in_float)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._held and name not in self.in_float

    @torch.no_grad()
    def __getitem__(self, name: str) -> WeightCodes:
        if name not in self:
            raise KeyError(name)
        (_, first), *_ = self._held[name].items()
        weight = first.tensor
        quantizer = _fixed(first.quantizer, weight)
        params = quantizer.qparams(weight)
        codes = library.encode(weight, params, quantizer.spec)
        assert codes is not None, "a weight with NaN stays in float, see `_values_reason`"
        shape, readers = tuple(weight.shape), tuple(self._held[name])
        return WeightCodes(codes, *params[:2], quantizer.spec, shape, weight.dtype, readers)


def _reason(held: Mapping[str, Product]) -> str:
    """Why the codes of a weight cannot stand for it, or an empty text."""
    (_, first), *_ = held.items()
    weight = first.tensor
    if is_sharded(weight):
        return "it is sharded over processes"
    if weight.is_meta:
        return "it is on the meta device, which holds no values"
    for quantizer in (one.quantizer for one in held.values()):
        if quantizer.mode is not Mode.QUANTIZE:
            return "its quantizer is switched off"
        if quantizer.learned is not None:
            return "its range is learned; fakequant.qat.set_scales(model, fakequant.qat.Scales.FIXED) fixes it"
        if quantizer.dynamic:
            return "its range is dynamic"
        if not quantizer.calibrated and not bool(weight.isfinite().all()):
            return "it holds NaN or inf"
    return _values_reason([_fixed(one.quantizer, weight) for one in held.values()], weight)


@torch.no_grad()
def _fixed(quantizer: Quantizer, weight: Tensor) -> Quantizer:
    """A quantizer with scales: that of a weight, or while it has none, another with those of its next call."""
    if quantizer.calibrated:
        return quantizer
    fixed = Quantizer(quantizer.spec, kind=quantizer.kind)
    fixed.freeze(weight)
    return fixed


@torch.no_grad()
def _values_reason(fixed: list[Quantizer], weight: Tensor) -> str:
    spec, params = fixed[0].spec, fixed[0].qparams(weight)
    for other in fixed[1:]:
        theirs = other.qparams(weight)
        if other.spec != spec or not all(map(is_same, theirs[:2], params[:2])):
            return "the layers that share it quantize it in different ways"
    codes = library.encode(weight, params, spec)
    if codes is None:
        return "it holds NaN"
    values = dequantize(codes, params, spec, dtype=weight.dtype)
    again = library.fake_quantize(values, fixed[0].qparams(values), spec)
    same = torch.equal(values, again) and torch.equal(values, library.fake_quantize(weight, params, spec))
    return "" if same else "its codes do not give the same values"


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two parameters of quantizers are equal in all values, or one object."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))
