"""The weights of a quantized model as codes, made at each access, and the reason if a weight has no codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.distributed import is_sharded
from fakequant.errors import QParamsError
from fakequant.functional import dequantize
from fakequant.nn.paths import layer_of, module_at
from fakequant.nn.products import Product
from fakequant.nn.quantizer import Kind, Mode, Quantizer, is_same, quantizers, weight_version
from fakequant.numerics.formats.floats import check_codes
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.text import listed


@dataclass(frozen=True, eq=False)
class WeightCodes:
    """A weight as codes, with all data that `values` needs to compute the float weight.

    Attributes:
        codes: the codes of `fakequant.quantize`, in the storage dtype of the format and the shape of the weight.
        scale: a scale for each group, see `Granularity.group_shape`.
        zero_point: the zero points in the shape of the scale, int32, or offsets in units of x if `spec` has them; None
            if symmetric.
        spec: how the weight is quantized.
        shape: the shape of the weight.
        dtype: the dtype of the weight.
        quantizers: the paths of the quantizers that read the weight, all with this scale; () if they are not known.

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
        """Check that codes and scale are there, and that the codes fit format and shape; `apply` checks the scales.

        Raises:
            ShapeError: the codes have another shape than the weight.
            QParamsError: codes or scale are missing, or the codes have another dtype or are not in the format.
        """
        if missing := [name for name in ("codes", "scale") if not isinstance(getattr(self, name), Tensor)]:
            raise QParamsError(f"have no {missing[0]}")
        check_codes(self.codes, self.shape, self.spec.format)


class QuantizedWeights(Mapping[str, WeightCodes]):
    """For the name of each quantized parameter of a model, its codes, which are computed anew at each access.

    A weight without scales gets the scales that its next call would use; these scales stay until the weight changes.
    The first access checks every weight, one after the other: its codes must give the same bits.

    Args:
        shared: for each further name of a tied tensor, its first name.
        weights: the result of `quantized_weights`.

    Attributes:
        dtype: the dtype to which weights are rounded before they are quantized; None keeps the dtype of each weight.
    """

    def __init__(self, model: nn.Module, shared: Mapping[str, str], weights: Mapping[str, Product]) -> None:
        self.dtype: torch.dtype | None = None
        by_parameter: dict[int, dict[str, Product]] = {}
        for path, weight in weights.items():
            by_parameter.setdefault(id(weight.parameter), {})[path] = weight
        readers, paths = dict[str, set[tuple[int, str]]](), dict[str, list[str]]()
        self._fixed: dict[str, tuple[Any, Quantizer]] = {}
        self._held: dict[str, dict[str, Product]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if held := by_parameter.get(id(parameter)):
                first = shared.get(name, name)
                self._held[first] = held
                path, _, own = name.rpartition(".")
                readers.setdefault(first, set()).add((id(module_at(model, path)), own))  # a layer with two names once
                paths.setdefault(first, []).append(path)
        self._left = {
            f"{layer_of(path)}.{weight.name}".lstrip("."): "it is computed when the layer is called"
            for path, weight in by_parameter.get(id(None), {}).items()
        }
        self._left |= {
            path: "other functions with quantizers read it, or it is computed"
            for path, quantizer in quantizers(model).items()
            if quantizer.kind is Kind.WEIGHT and path not in weights and quantizer.mode is Mode.QUANTIZE
        }
        for name, own in readers.items():
            if len(self._held[name]) != len(own):  # one layer quantizes it, and another one reads it in float
                quantized = layer_of(next(iter(self._held[name])))
                left = [path for path in paths[name] if path != quantized]
                self._left[name] = (
                    f"{listed(left)} has the same weight and no quantizer; leave both in float by "
                    f"prepare(..., skip={[quantized, *left]!r})"
                )

    @cached_property
    def in_float(self) -> dict[str, str]:
        """For the name of each weight that has a quantizer but no codes: the reason."""
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
        weight, quantizer = self.scaled(name)
        found = quantizer.encoded(weight)
        assert found is not None, "a weight with NaN stays in float, see `_reason`"
        codes, params = found
        shape, readers = tuple(weight.shape), tuple(self._held[name])
        return WeightCodes(codes, *params[:2], quantizer.spec, shape, weight.dtype, readers)

    @torch.no_grad()
    def uncoded(self, name: str) -> WeightCodes:
        """A weight with its shape and scales, but a meta tensor in place of the codes, which are not computed."""
        weight, quantizer = self.scaled(name)
        shape, params = tuple(weight.shape), quantizer.qparams(weight)
        codes = torch.empty(shape, dtype=quantizer.spec.format.storage, device="meta")
        return WeightCodes(codes, *params[:2], quantizer.spec, shape, weight.dtype, tuple(self._held[name]))

    @torch.no_grad()
    def params(self, name: str) -> QParams:
        """The scale and zero point of a weight; its codes are not computed."""
        weight, quantizer = self.scaled(name)
        return quantizer.qparams(weight)

    def scaled(self, name: str) -> tuple[Tensor, Quantizer]:
        """A weight and its quantizer; if the quantizer has no scales, a new quantizer with the next call's scales."""
        first, *_ = self._held[name].values()
        weight, quantizer = first.tensor, first.quantizer
        if self.dtype not in (None, weight.dtype):
            weight = weight.to(self.dtype)
            return weight, _fixed(quantizer, weight)
        if quantizer.calibrated or type(weight) is not nn.Parameter or weight.is_inference():
            return weight, _fixed(quantizer, weight)
        seen = weight_version(weight), quantizer.spec
        if name not in self._fixed or self._fixed[name][0] != seen:
            self._fixed[name] = seen, _fixed(quantizer, weight)
        return weight, self._fixed[name][1]


def uncoded(weights: Mapping[str, WeightCodes], name: str) -> WeightCodes:
    """A weight, with a meta tensor in place of its codes if the mapping has a method `uncoded`, else with its codes."""
    made = getattr(weights, "uncoded", None)
    return weights[name] if made is None else made(name)


def _reason(held: Mapping[str, Product]) -> str:
    """Why the codes cannot replace a weight bit for bit; "" if they can."""
    (_, first), *_ = held.items()
    weight = first.tensor
    if is_sharded(weight):
        return "it is sharded over processes"
    if weight.is_meta:
        return "it is on the meta device, which holds no values"
    # A sum is finite only where all values are. It takes 13 ms for 16M values in bfloat16, isfinite().all() 330.
    finite = bool(weight.sum().isfinite()) or bool(weight.isfinite().all())
    for quantizer in (one.quantizer for one in held.values()):
        if quantizer.mode is not Mode.QUANTIZE:
            return "its quantizer is switched off"
        if quantizer.learned is not None:
            return "its range is learned; fakequant.qat.set_scales(model, fakequant.qat.Scales.FIXED) fixes it"
        if quantizer.dynamic:
            return "its range is dynamic"
        if not quantizer.calibrated and not finite:
            return "it holds NaN or inf"
    if not finite and bool(weight.isnan().any()):
        return "it holds NaN"
    one, *others = [one.quantizer for one in held.values()]
    if one.spec.rounding is Rounding.STOCHASTIC and not one.needs_codes(weight):
        return "it is rounded stochastically, so that each call draws other codes"
    same = all(_are_alike(_fixed(one, weight), _fixed(other, weight), weight) for other in others)
    return "" if same else "the layers that share it quantize it in different ways"


@torch.no_grad()
def _fixed(quantizer: Quantizer, weight: Tensor) -> Quantizer:
    """The quantizer of a weight if it has scales, else a new quantizer with the scales of the weight's next call."""
    if quantizer.calibrated:
        return quantizer
    fixed = Quantizer(quantizer.spec, kind=quantizer.kind)
    fixed.freeze(weight)
    return fixed


@torch.no_grad()
def _are_alike(one: Quantizer, other: Quantizer, weight: Tensor) -> bool:
    """Whether two quantizers of a weight without NaN give the same codes and scales."""
    if one.spec != other.spec or not all(map(is_same, one.qparams(weight)[:2], other.qparams(weight)[:2])):
        return False
    if not (one.needs_codes(weight) or other.needs_codes(weight)):
        return True
    codes, others = one.encoded(weight), other.encoded(weight)
    return codes is not None and others is not None and torch.equal(codes[0], others[0])
