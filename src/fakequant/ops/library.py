"""The operator `fake_quantize` in eager code, under compilers and exporters, and in function transforms.

* Eager: a backend's cached plan for this kind of call (`dispatch.py`), under autograd (`graph_operators.py`). One bit
  per element is saved, and x where a scale is learned.
* torch.compile where compilers would compute other bits (`division.approximate_devices`): one node of a graph, see
  `graph_operators.py`; or, see `is_compiled_in_line`, the definition with quotients and products as nodes, which
  Inductor compiles to exact instructions. A mask is saved.
* torch.compile elsewhere, torch.func, forward-mode AD, tensor subclasses: the definition as plain torch operations, so
  that a compiler fuses it with its neighbours. There x itself is saved, see `_found_in_backward`.
* torch.export and torch.jit.trace: two nodes. `fakequant::fake_quantize` carries the specification as text.
  `fakequant::choose_scale` does too, and computes the scale from the range of the tensor.

The file also has ranges and histograms of values, which have kernels but no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fakequant.distributed import is_sharded
from fakequant.errors import ShapeError
from fakequant.numerics import division, reference
from fakequant.numerics.granularity import Granularity
from fakequant.numerics.philox import draw_seed
from fakequant.numerics.qparams import QParams, Range, compute_dtype, is_concrete, shape_of
from fakequant.numerics.qparams import measure as _measure
from fakequant.numerics.reference import Bins, Observed, is_less, is_less_by_plain_sums, observe_by_definition
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding
from fakequant.ops.graph_operators import (
    Decomposed,
    DecomposedInTransforms,
    apply_in_transforms,
    apply_plan,
    is_compiled_as_node,
    is_compiled_in_line,
    is_compiled_in_transforms,
    is_recorded,
    keep_whole,
    needs_tracing,
    on_mesh_of,
    tensors_of,
    translated_to_onnx,
    unpack_mask,
)

from .backend import CODES, RELU, Extras, KernelPlan
from .dispatch import choose_for, find_plan
from .graph_operators import quantize_as_node, text_of

__all__ = ["needs_tracing", "translated_to_onnx"]

_LARGE = 1 << 16  # elements


def fake_quantize(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """Quantize and dequantize x, with the straight-through gradient of the specification.

    `params` must be valid, on the device of x, in a shape that the granularity accepts; the public function that checks
    them is `fakequant.fake_quantize`. Without a seed, a seed of stochastic rounding is drawn.
    """
    return quantize_by(x, spec, *params)


def quantize_by(
    x: Tensor,
    spec: QuantSpec,
    scale: Tensor,
    zero_point: Tensor | None = None,
    range: Range | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """`fake_quantize` with scale, zero point, range and seed as separate arguments."""
    plan = find_plan(x, spec, scale, zero_point)
    if plan is None:  # by torch's operations or as a node of a graph
        compute_dtype(x.dtype)
        if spec.rounding is Rounding.STOCHASTIC and seed is None:
            seed = draw_seed()
        params = _fitted(QParams(scale, zero_point, range, seed), x, spec)
        if is_recorded():
            seeds = () if seed is None else (seed,)
            return torch.ops.fakequant.fake_quantize(x, params.scale, params.zero_point, spec.to_text(), *seeds)
        if is_compiled_in_transforms():
            keep_whole()
            return apply_in_transforms(x, text_of(spec), *tensors_of(params))
        if is_compiled_as_node(x) and not is_compiled_in_line(x, spec, params):
            return quantize_as_node(x, spec, *params)
        traced = Decomposed if torch.compiler.is_compiling() else DecomposedInTransforms
        return traced.apply(x, *tensors_of(on_mesh_of(x, params)), spec)
    if spec.rounding is Rounding.STOCHASTIC or (range is not None and spec.gradient is Gradient.INPUT_RANGE):
        plan = _with_extras(plan, range, seed)
    y = apply_plan(plan, x, scale, zero_point)
    return _otherwise(plan, x, scale, zero_point) if y is None else y


def _otherwise(plan: KernelPlan, x: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """x quantized by the plan for parameters that the first plan refuses as not valid."""
    assert plan.otherwise is not None, "only such plans refuse parameters"
    extras = plan.descriptor if isinstance(plan.descriptor, Extras) else plan.otherwise.descriptor
    y = apply_plan(plan.otherwise._replace(descriptor=extras), x, scale, zero_point)
    assert y is not None, "it computes with any parameters"
    return y


def fake_quantize_over(x: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None) -> bool:
    """Overwrite x with its quantized values, without a gradient; False if no kernel can, and x is unchanged.

    Also False if a parameter is not valid or shares memory with x, which kernels overwrite while they read it, or if
    the memory holds the negatives of x, as for `torch.conj(z).imag`.
    """
    plan = find_plan(x, spec, scale, zero_point)
    if plan is None or plan.values_over is None or x.is_inference() or x.is_neg():
        return False
    memory = x.untyped_storage()
    for given in (scale, zero_point):
        # Two storages can overlap, if they come from NumPy or DLPack.
        other = None if given is None else given.untyped_storage()
        if other is not None and (
            memory.data_ptr() < other.data_ptr() + other.nbytes()
            and other.data_ptr() < memory.data_ptr() + memory.nbytes()
        ):
            return False
    if not plan.values_over(x, scale, zero_point, plan.descriptor):
        return False
    # Autograd refuses a gradient for which the former values were saved.
    torch.autograd.graph.increment_version(x)
    return True


def fake_quantize_relu(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """`fake_quantize` of torch.relu(x), with the gradient of both.

    Where a backend can, forward and backward are each one pass over memory, and one bit per element is saved, while
    torch.relu alone saves its result.
    """
    # A scale that learns needs the ReLU's result again.
    learns = torch.is_grad_enabled() and are_learned(params)
    plan = None if learns else find_plan(x, spec, *params[:2], RELU)
    if plan is not None and spec.gradient is Gradient.INPUT_RANGE:
        plan = _with_extras(plan, params.range, None)
    y = None if plan is None else apply_plan(plan, x, *params[:2])
    return fake_quantize(torch.relu(x), params, spec) if y is None else y


def fake_quantize_with_mask(x: Tensor, params: QParams, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """`fake_quantize`, and a bool mask [shape of x] of where its gradient reaches x.

    For libraries whose operators return the mask; for the backward pass autograd saves one bit per element instead.
    """
    if spec.rounding is Rounding.STOCHASTIC and params.seed is None:
        params = params._replace(seed=draw_seed())
    plan = find_plan(x, spec, *params[:2])
    if plan is None:
        return fake_quantize(x, params, spec), reference.passes(x, params, spec)
    if spec.gradient is Gradient.IDENTITY:
        return fake_quantize(x, params, spec), torch.ones_like(x, dtype=torch.bool)
    plan = _with_extras(plan.otherwise or plan, params.range, params.seed)
    with torch.no_grad():
        y, bits = plan.values_and_mask(x, *params[:2], plan.descriptor)
        assert y is not None, "it computes with any parameters"
        assert bits is not None, "only IDENTITY has no mask"
        mask = unpack_mask(bits, x.shape, plan)
    # Quantized again where gradients are wanted: the autograd function has one output, and costs about one copy.
    wanted = torch.is_grad_enabled() and (x.requires_grad or are_learned(params))
    return (fake_quantize(x, params, spec) if wanted else y), mask


def fake_quantize_dynamic(x: Tensor, spec: QuantSpec, seed: Tensor | None = None) -> Tensor:
    """`fake_quantize` with the parameters from the range of x; the range gets no gradient.

    It gives the bits of measuring, choosing parameters and quantizing in turn, in fewer passes over memory. Without a
    seed, a seed of stochastic rounding is drawn.

    Raises:
        DTypeError: x is not a floating tensor.
        ShapeError: the granularity does not fit x.
    """
    plan = find_plan(x, spec)
    if plan is None:
        compute_dtype(x.dtype)
        is_stochastic = spec.rounding is Rounding.STOCHASTIC
        if is_stochastic and seed is None:
            seed = draw_seed()
        if is_recorded() and spec.symmetric:
            scale = torch.ops.fakequant.choose_scale(x.detach(), spec.to_text())
            return fake_quantize(x, QParams(scale, seed=seed), spec)
        compiled = torch.compiler.is_compiling()
        # With a GELU before it, 1M elements took a CPU 4.4 to 6.3 ms as operations of torch and 2.3 to 2.8 as a node;
        # 4,000 elements 0.3 to 0.6 ms, and up to 0.13 more as a node.
        is_large = compiled and not division.is_exporting() and not is_sharded(x)
        is_large = is_large and not is_compiled_in_transforms() and x.numel() >= _LARGE
        # As operations of torch, random words made a step of a layer of 2048 x 128 x 256 take 34 ms in place of 17.
        if is_compiled_as_node(x) or (compiled and is_stochastic) or is_large:
            return quantize_as_node(x, spec, seed=seed)
        return fake_quantize(x, reference.choose(x, spec)._replace(seed=seed), spec)
    if spec.rounding is Rounding.STOCHASTIC:
        plan = _with_extras(plan, None, seed)
    y = apply_plan(plan, x, None, None)
    return _otherwise(plan, x, None, None) if y is None else y


def _with_extras(plan: KernelPlan, range: Range | None, seed: Tensor | None) -> KernelPlan:
    """The plan for one call with a range or a seed; without a seed, a new one is drawn for stochastic rounding."""
    if plan.spec.rounding is Rounding.STOCHASTIC and seed is None:
        seed = draw_seed()
    if range is not None:
        range = Range(range.lo.detach(), range.hi.detach())
    return plan._replace(descriptor=Extras(range, seed))


def _fitted(params: QParams, x: Tensor, spec: QuantSpec) -> QParams:
    """Scale and zero point in the shape that broadcasts with x; raises ShapeError if they do not fit."""
    shape, scale, zero_point = shape_of(x), params.scale, params.zero_point
    groups = spec.granularity.group_shape(shape)
    for given in (scale, zero_point):
        if given is None or shape_of(given) == groups:
            continue
        single = given.numel() == 1 == math.prod(groups)
        if not single and tuple(shape_of(given)) not in spec.granularity.scale_shapes(shape):
            raise ShapeError(
                f"a parameter of shape {list(given.shape)} does not fit {spec.granularity} on a tensor of shape "
                f"{list(x.shape)}; give one value for each group, of shape {list(groups)}"
            )
    if shape_of(scale) != groups:
        scale = scale.reshape(groups)
    if zero_point is not None and shape_of(zero_point) != groups:
        zero_point = zero_point.reshape(groups)
    return params._replace(scale=scale, zero_point=zero_point)


def measure(x: Tensor, granularity: Granularity) -> Range:
    """The range of the finite values of every group, see `numerics.qparams.measure`."""
    compute_dtype(x.dtype)
    if needs_tracing(x):
        return _measure(x, granularity)
    return choose_for(x).measure(x.detach(), granularity)


def at_once(x: Tensor) -> int:
    """How many elements of tensors like x a search should compute at once, see `Backend.at_once`."""
    return choose_for(x).at_once


def choose(x: Tensor, spec: QuantSpec, range: Range | None = None) -> QParams:
    """The scale and zero point for x, or for another range, see `numerics.reference.choose`."""
    compare = is_less if needs_tracing(x) else is_less_by_plain_sums
    return reference.choose_from(x, measure(x, spec.granularity) if range is None else range, spec, compare)


def quantize(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """The codes of x, without gradients."""
    x, plan = x.detach(), None if needs_tracing(params.seed) else find_plan(x, spec, *params[:2], CODES)
    if plan is None:
        return reference.quantize(x, on_mesh_of(x, _fitted(params, x, spec)), spec)
    if spec.rounding is Rounding.STOCHASTIC:
        plan = plan._replace(descriptor=Extras(params.range, params.seed))
    with torch.no_grad():
        return plan.codes(x, *params[:2], plan.descriptor)[0]


def encode(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor | None:
    """The codes of x, without gradients; None if x has NaN, which has no code.

    For formats with integer codes that round to nearest.
    """
    with torch.no_grad():
        plan = find_plan(x, spec, *params[:2], CODES)
        if plan is None:
            return None if bool(x.isnan().any()) else reference.quantize(x, _fitted(params, x, spec), spec)
        codes, has_nan = plan.codes(x, *params[:2], plan.descriptor)
    return None if has_nan else codes


def dequantize(codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The decoded values of codes, without gradients."""
    plan = find_plan(codes, spec, *params[:2], CODES, dtype)
    if plan is None:
        return reference.dequantize(codes, _fitted(params, codes, spec), spec, dtype)
    with torch.no_grad():
        return plan.decode(codes, *params[:2], plan.descriptor)


def are_learned(params: QParams) -> bool:
    """Whether the scale or the zero point requires a gradient."""
    return params.scale.requires_grad or (params.zero_point is not None and params.zero_point.requires_grad)


def observe(values: Tensor, bins: Bins | None = None) -> Observed:
    """The range of values [groups, elements >= 1], and their histogram if `bins` is not None."""
    if not is_concrete(values):
        return observe_by_definition(values, bins)
    return choose_for(values).observe(values.contiguous(), bins)


def update(values: Tensor, range: Range, bins: Bins | None, counts: Tensor | None) -> bool:
    """Widen `range` in place to contain the values, add the values to `counts`, and return True.

    Change nothing and return False if a value is not finite or is beyond the last bin, or if no kernel can do it.

    Args:
        values: [groups, elements] in memory, without gaps.
        range: lowest and highest value of every group, in the dtype of computation; it contains 0.0.
        bins: the bins of the histogram; None counts nothing.
        counts: int64 [groups, 2, bins], or None.
    """
    if not is_concrete(values) or values.device != range.lo.device:
        return False
    return choose_for(values).take_in(values, range, bins, counts)


def join_bins(counts: Tensor, times: Tensor) -> Tensor:
    """The counts [groups, 2, bins] after neighbouring bins were merged `times` times [groups].

    >>> join_bins(torch.tensor([[[4, 1, 2, 3], [0, 0, 5, 6]]]), torch.tensor([1]))
    tensor([[[ 5,  5,  0,  0],
             [ 0, 11,  0,  0]]])
    """
    # On a CPU a few groups grow. To ask which would be a wait for an accelerator, where all of them are written.
    grown = times.nonzero().reshape(-1) if times.is_cpu else None
    if grown is not None and grown.numel() == 0:
        return counts
    old, joined = (counts, times) if grown is None else (counts[grown], times[grown])
    bins = counts.shape[2]
    shift = joined.to(torch.int64).clamp(max=bins.bit_length())[:, None, None]
    index = torch.bitwise_right_shift(torch.arange(bins, device=counts.device), shift)
    new = torch.zeros_like(old).scatter_add_(2, index.expand_as(old), old)
    return new if grown is None else counts.index_copy(0, grown, new)
