"""A search for scales and offsets that are stored in small formats, by the squared error of the tensor.

Each group first gets the scale and offset that fit its values best, by least squares from several starts, as in
`make_qkx3_quants` of llama.cpp. Then both are rounded to their formats: several shared scales, which multiply the
scales or offsets of several groups, are tried; the codes of scales and offsets are chosen by the error after
rounding; and both are fitted again. A step counts only if it lowers the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fakequant.numerics.granularity import block_axes, blocked, farthest, over_blocks, rounded
from fakequant.numerics.qparams import QParams, compute_dtype
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.ops import library

_STARTS = 13
_REACH = 1.6
"""The first scales tried map the farthest value up to this many codes beyond or within the end of the format."""
_SHARED = tuple(1.0 + step / 100.0 for step in (0, -1, 1, -2, 2, -4, 4, 6))
"""The shared scales tried, as multiples of that under which the farthest scale gets the farthest code."""
_ROUNDS = 2


def searches(spec: QuantSpec) -> bool:
    """Whether `search_params` supports a specification, which has offsets, or is symmetric with a format for scales.

    >>> searches(QuantSpec.parse("int8 per_block(-1:32) scale=float16")), searches(QuantSpec("int8"))
    (True, False)
    """
    known = spec.offset is not None or (spec.symmetric and spec.scale.is_exact)
    return known and spec.arithmetic is not Arithmetic.MULTIPLIER


def search_params(x: Tensor, spec: QuantSpec, moments: Tensor | None = None) -> QParams:
    """Scales and offsets with a small squared error of x, never larger than with the parameters from the range.

    Args:
        x: [rows, ...]; inf and NaN count as 0.
        spec: one for which `searches` is true.
        moments: the sum of v v^T over the inputs v that multiply the rows, [columns, columns]: then the error of the
            products is searched, and entries of two columns with different scales count as 0. None: the error of x.

    >>> x = torch.tensor([[0.1, 0.9, 2.1, 2.9]])
    >>> spec = QuantSpec.parse("uint2 per_channel(0) scale=float16 offset=float16")
    >>> plain, found = fq.choose_qparams(x, spec), search_params(x, spec)
    >>> [f"{(library.fake_quantize(x, own, spec) - x).square().sum():.3f}" for own in (plain, found)]
    ['0.042', '0.037']
    """
    exact = torch.where(x.isfinite(), x, 0.0).detach().contiguous()  # sums depend on the order in memory
    rows = max(library.at_once(x) // max(x[0].numel(), 1), 1) if x.dim() and len(x) else 1
    if not x.numel() or not rows_are_apart(x, spec):
        return _better(exact, spec, moments)
    return joined([_better(exact[start : start + rows], spec, moments) for start in range(0, len(x), rows)])


def joined(parts: Sequence[QParams]) -> QParams:
    """The parameters of a tensor from those of its parts along the first axis."""
    scale = torch.cat([part.scale for part in parts])
    offsets = [part.zero_point for part in parts if part.zero_point is not None]
    return QParams(scale, torch.cat(offsets) if offsets else None)


def rows_are_apart(x: Tensor, spec: QuantSpec) -> bool:
    """Whether no two rows of a tensor share a scale, an offset, or the shared scale of scales or offsets.

    >>> rows_are_apart(torch.ones(2, 8), QuantSpec.parse("int4 per_block(-1:4) scale=float16"))
    True
    >>> rows_are_apart(torch.ones(2, 8), QuantSpec.parse("int4 per_block(-1:4) scale=uint6@per_block(0:2)/float16"))
    False
    """
    groups = spec.granularity.group_shape(x.shape)
    apart = all(granularity.block_shape(groups)[0] == 1 for granularity in spec.shared_granularities)
    return spec.granularity.block_shape(x.shape)[:1] == (1,) and apart


def _better(x: Tensor, spec: QuantSpec, moments: Tensor | None) -> QParams:
    """The parameters from the search or from the range with the smaller error, for each shared scale or group."""
    plain = library.choose(x, spec)
    if not x.numel():
        return plain
    search = _Search(x, spec, moments)
    found = search.found(plain)
    take = search.true_error(found) < search.true_error(plain)
    offset = plain.zero_point
    if offset is not None and found.zero_point is not None:
        offset = torch.where(take, found.zero_point, offset)
    return QParams(torch.where(take, found.scale, plain.scale), offset)


class _Store:
    """How scales or offsets of groups are stored: as codes, with shared scales or without."""

    def __init__(self, spec: ScaleSpec, groups: torch.Size) -> None:
        self.spec, self._shape = spec, groups
        self.blocks = None if spec.granularity is None else spec.granularity.block_shape(groups)

    @property
    def shares(self) -> bool:
        return self.blocks is not None

    def over(self, values: Tensor) -> Tensor:
        """For each group, the sum of the values of all groups that have the same shared scale."""
        return values if self.blocks is None else _sums(values, self.blocks)

    def starts(self, values: Tensor) -> list[Tensor]:
        """For each group, the shared scales to try if `values` are the wanted scales or offsets."""
        if self.blocks is None or self.spec.format is None:
            return [torch.ones_like(values)]
        fmt, far = self.spec.format, over_blocks(values, self.blocks, farthest)
        ends = [fmt.farthest, *([fmt.quant_max if fmt.farthest < 0 else fmt.quant_min] if fmt.signed else [])]
        return [self.shared(far * (factor / end)) for end in ends for factor in _SHARED]

    def shared(self, values: Tensor) -> Tensor:
        return values if self.spec.shared is None else rounded(values, self.spec.shared)

    def codes(self, values: Tensor, shared: Tensor) -> Tensor:
        """The nearest codes for wanted scales or offsets, under shared scales."""
        if self.spec.format is None:
            return values
        return rounded(values / torch.where(shared == 0, torch.inf, shared), self.spec.format)


def _sums(values: Tensor, blocks: tuple[int, ...]) -> Tensor:
    return over_blocks(values, blocks, lambda view, axes: view.sum(axes, True))


class _CodeSums(NamedTuple):
    """The sums q'Hq, q'H1 and q'Hx over the values x and codes q of every group; H is `moments`, or the identity."""

    qq: Tensor
    q1: Tensor
    qx: Tensor


class _Fit(NamedTuple):
    """Scales and offsets of every group in float, and the error that they leave."""

    s: Tensor
    m: Tensor
    error: Tensor


class _Point(NamedTuple):
    """Scales d * sc and offsets dm * mc of every group, where d and dm are shared scales, and the error they leave."""

    d: Tensor
    sc: Tensor
    dm: Tensor
    mc: Tensor
    error: Tensor

    @property
    def scale(self) -> Tensor:
        return self.d * self.sc

    @property
    def offset(self) -> Tensor:
        return self.dm * self.mc


class _Search:
    """The search for a tensor, whose values `x` are [*groups, elements]."""

    def __init__(self, x: Tensor, spec: QuantSpec, moments: Tensor | None) -> None:
        self._given, self._spec, self._blocks = x, spec, spec.granularity.block_shape(x.shape)
        self._groups = torch.Size(spec.granularity.group_shape(x.shape))
        self.scale = _Store(spec.scale, self._groups)
        self.offset = None if spec.offset is None else _Store(spec.offset, self._groups)
        self.x = self._by_group(x.to(compute_dtype(x.dtype)))
        one = self._by_group(torch.ones_like(x)).to(self.x.dtype)
        self._full = self._diagonal = None
        if moments is not None:
            self._full = self._inside(moments.to(self.x.dtype))
            columns = moments.diagonal().to(self.x.dtype).reshape(1, *x.shape[1:]).expand(x.shape)
            self._diagonal = self._by_group(columns) if self._full is None else None
        elif self.x.numel() != x.numel():
            self._diagonal = one
        self._x = self._times(self.x)
        self._one = self._times(one)
        self._11, self._1x = (one * self._one).sum(-1), (one * self._x).sum(-1)

    def _by_group(self, x: Tensor) -> Tensor:
        view, axes = blocked(x, self._blocks), block_axes(x.shape, self._blocks)
        order = [axis for axis in range(view.dim()) if axis not in axes]
        return view.permute(*order, *axes).reshape(*self._groups, -1)

    def _inside(self, moments: Tensor) -> Tensor | None:
        """The `moments` of each group's columns [groups, elements, elements]; None if the columns are apart."""
        size = self.x.shape[-1]
        columns = torch.arange(len(moments), device=moments.device)
        numbers = self._by_group(columns.reshape(1, *self._given.shape[1:]).expand(self._given.shape))
        if len(moments) % size or not torch.equal(numbers[0].flatten(), columns):
            return None
        parts = moments.unflatten(0, (-1, size)).unflatten(2, (-1, size))
        return parts.diagonal(dim1=0, dim2=2).movedim(-1, 0).contiguous()

    def _times(self, values: Tensor) -> Tensor:
        if self._full is not None:
            rows = values.reshape(len(values), len(self._full), -1)
            full = self._full.to(values.dtype)
            return torch.bmm(rows.transpose(0, 1), full).transpose(0, 1).reshape(values.shape)
        return values if self._diagonal is None else values * self._diagonal

    def _codes(self, s: Tensor, m: Tensor) -> Tensor:
        s = torch.where(s == 0, torch.finfo(s.dtype).max, s)[..., None]
        wanted, fmt = (self.x if self.offset is None else self.x + m[..., None]) / s, self._spec.format
        if (table := fmt.grid.table) is None:
            return fmt.round(wanted).clamp_(fmt.quant_min, fmt.quant_max)
        # As `Format.round` except at ties, in a tenth of its time.
        values, middles = (wanted.new_tensor(own) for own in (table.values, table.middles))
        return values[torch.bucketize(wanted, middles)]

    def _error(self, codes: Tensor, s: Tensor, m: Tensor) -> Tensor:
        error = codes * s[..., None]
        error -= self.x if self.offset is None else self.x + m[..., None]
        found = (error * self._times(error)).sum(-1)
        return torch.where(found.isnan(), torch.inf, found)

    def _sums(self, codes: Tensor) -> _CodeSums:
        weighed = self._times(codes)
        return _CodeSums((codes * weighed).sum(-1), (codes * self._one).sum(-1), (codes * self._x).sum(-1))

    def true_error(self, params: QParams) -> Tensor:
        """The squared error of fake quantization, summed over all groups that a shared scale joins."""
        spec = self._spec.replace(rounding=Rounding.NEAREST_EVEN)
        # In float64, where squares of float32 neither overflow nor vanish.
        error = self._by_group(library.fake_quantize(self._given, params, spec)).double() - self.x.double()
        found = (error * self._times(error)).sum(-1)
        if shared := [granularity.block_shape(self._groups) for granularity in spec.shared_granularities]:
            tied = (min(math.lcm(*sizes), n) for *sizes, n in zip(*shared, self._groups, strict=True))
            found = _sums(found, tuple(tied))
        return torch.where(found.isnan(), torch.inf, found)

    def found(self, plain: QParams) -> QParams:
        s, m = self._free()
        point = self._on_lattice(s, m)
        for _ in range(_ROUNDS):
            # Other codes of scales, each with the offset that fits it.
            sums = self._sums(self._codes(point.scale, point.offset))
            fitted = self.scale.codes(self._allowed((sums.qx + point.offset * sums.q1) / sums.qq), point.d)
            tried = [fitted, point.sc, point.sc + 1, point.sc - 1] if self.scale.shares else [fitted, point.sc]
            for sc in tried:
                if self.scale.spec.format is not None:
                    sc = rounded(sc, self.scale.spec.format)
                mc = point.mc
                if self.offset is not None:
                    s = point.d * sc
                    mc = self.offset.codes(self._offset_for(self._codes(s, point.offset), s), point.dm)
                point = _less(point, self._point(point.d, sc, point.dm, mc))
            # Shared scales that fit the codes better.
            if self.scale.shares:
                sums = self._sums(self._codes(point.scale, point.offset))
                up = self.scale.over(point.sc * (sums.qx + point.offset * sums.q1))
                down = self.scale.over(point.sc.square() * sums.qq)
                d = self.scale.shared((up / down).nan_to_num(0.0, 0.0, 0.0))
                point = _less(point, self._point(d, point.sc, point.dm, point.mc), self.scale)
            if self.offset is not None and self.offset.shares:
                q1 = (self._codes(point.scale, point.offset) * self._one).sum(-1)
                up = self.offset.over(point.mc * (point.scale * q1 - self._1x))
                down = self.offset.over(point.mc.square() * self._11)
                dm = self.offset.shared((up / down).nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0))
                point = _less(point, self._point(point.d, point.sc, dm, point.mc), self.offset)
        return QParams(point.scale, None if self.offset is None else point.offset)

    def _free(self) -> tuple[Tensor, Tensor]:
        """The best scales and offsets of groups in float, before they are rounded to their formats."""
        fmt = self._spec.format
        low, high = self.x.amin(-1).clamp(max=0.0), self.x.amax(-1)
        if self.offset is not None:
            ends, extent, start = [fmt.quant_max], high - low, -low
        else:
            extent, start = torch.where(-low > high, low, high), torch.zeros_like(low)
            ends = [fmt.quant_min, fmt.quant_max] if fmt.signed else [fmt.quant_max]
            if self._spec.scale.rounding is not ScaleRounding.SIGNED:
                extent, ends = extent.abs(), [fmt.bound]
        best = _Fit(torch.zeros_like(start), start, (self.x * self._x).sum(-1))
        step = fmt.bound / 2 ** (fmt.bits - int(fmt.signed))
        for end in ends:
            for beyond in torch.linspace(-_REACH, _REACH, _STARTS, device="cpu").tolist():
                best = self._fitted(best, extent / (end + beyond * step * (1 if end > 0 else -1)), start)
        for _ in range(2):
            best = self._fitted(best, best.s, best.m)
        return best.s, best.m

    def _fitted(self, best: _Fit, s: Tensor, m: Tensor) -> _Fit:
        """The better of two fits: the best so far, and least squares on the codes of s and m."""
        codes = self._codes(s, m)
        sums = self._sums(codes)
        alone = sums.qx / sums.qq
        if self.offset is None:
            s, m = self._allowed(alone), torch.zeros_like(alone)
        else:
            det = self._11 * sums.qq - sums.q1 * sums.q1
            s = (self._11 * sums.qx - sums.q1 * self._1x) / det
            m = (sums.q1 * sums.qx - sums.qq * self._1x) / det
            inside = (m >= 0) & (det > 0)
            s, m = self._allowed(torch.where(inside, s, alone)), torch.where(inside, m, 0.0)
        return _less(best, _Fit(s, m, self._error(codes, s, m)))

    def _allowed(self, s: Tensor) -> Tensor:
        if self._spec.scale.rounding is not ScaleRounding.SIGNED:
            s = s.clamp(min=0.0)
        return s.nan_to_num(0.0, 0.0, 0.0)

    def _offset_for(self, codes: Tensor, s: Tensor) -> Tensor:
        """The offset with the least error for given codes and scales."""
        return ((s * (codes * self._one).sum(-1) - self._1x) / self._11).clamp(min=0.0).nan_to_num(0.0, 0.0, 0.0)

    def _point(self, d: Tensor, sc: Tensor, dm: Tensor, mc: Tensor) -> _Point:
        s, m = d * sc, dm * mc
        return _Point(d, sc, dm, mc, self._error(self._codes(s, m), s, m))

    def _on_lattice(self, s: Tensor, m: Tensor) -> _Point:
        """The point with the best shared scales: those of the scales are chosen first, then those of the offsets."""
        one, best = torch.ones_like(s), None
        for d in self.scale.starts(s):
            sc = self.scale.codes(s, d)
            free = m if self.offset is None else self._offset_for(self._codes(d * sc, m), d * sc)
            best = _less(best, self._point(d, sc, one, free), self.scale)
        assert best is not None
        if self.offset is None:
            return best
        wanted, found = best, None
        for dm in self.offset.starts(wanted.mc):
            found = _less(found, self._point(wanted.d, wanted.sc, dm, self.offset.codes(wanted.mc, dm)), self.offset)
        assert found is not None
        return found


_Candidate = TypeVar("_Candidate", _Fit, _Point)


def _less(best: _Candidate | None, new: _Candidate, store: _Store | None = None) -> _Candidate:
    """In each group the better of two candidates; with `store`, one choice for all groups under a shared scale."""
    if best is None:
        return new
    errors = [own.error if store is None else store.over(own.error) for own in (new, best)]
    less = errors[0] < errors[1]
    return type(new)(*(torch.where(less, one, other) for one, other in zip(new, best, strict=True)))
