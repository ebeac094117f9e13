"""Counts of magnitudes with bounded memory, exact whatever the order of the data.

A group counts its negative and its non-negative values apart, in bins of width 2**exponent that start at 0. When a
larger value comes, the width doubles until it fits, and neighbouring bins are added. Because the width is a power of
two, x / width is exact and halving a bin's index is what counting with the doubled width would have given: so the
counts depend on the set of values alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fakequant.calibration.calibrator import Histogram, check_keys, power_of_two_or_zero, register_calibrator
from fakequant.calibration.extrema import Batch, ExtremaCalibrator, read_range
from fakequant.errors import CalibrationError, ConfigError
from fakequant.functional import fake_quantize
from fakequant.numerics.formats.floats import Format
from fakequant.numerics.granularity import PerChannel
from fakequant.numerics.qparams import Range, choose_qparams
from fakequant.numerics.reference import Bins
from fakequant.numerics.spec import QuantSpec
from fakequant.ops.library import join_bins, observe

# Each round of refinement tries this many neighbours on either side, at a stride finer by this factor.
_FINER = 8


def used_bins(counts: Tensor) -> Tensor:
    """The number of bins up to the last bin that is not empty, int64 [...], from counts [..., bins]; 0 without any.

    >>> used_bins(torch.tensor([[0, 3, 0, 1, 0], [0, 0, 0, 0, 0]]))
    tensor([4, 0])
    """
    positions = torch.arange(1, counts.shape[-1] + 1, device=counts.device)
    return torch.where(counts > 0, positions, 0).amax(-1)


def cheapest(cost: Callable[[Tensor], Tensor], first: int | Tensor, last: Tensor, *, bins: int, coarse: int) -> Tensor:
    """The candidate from `first` to `last` with the smallest cost; the largest candidate if several costs are equal.

    At most `coarse` candidates are all tried. Of more candidates every n-th is tried, counted from the last, and then
    the neighbours of the best at ever finer strides. The strides depend on `bins` alone, so that a group's result does
    not depend on the other groups.

    Args:
        cost: a function from candidates, int64 [groups, n], to their costs [groups, n].
        first: the smallest candidate, a number or int64 [groups]; in groups where `last` is smaller, it is `last`.
        last: the largest candidate, int64 [groups].
        bins: an upper bound of `last`.
        coarse: how many candidates to try at first.

    Returns:
        int64 [groups].

    >>> cheapest(lambda n: ((n - 700) ** 2).double(), 1, torch.tensor([4096, 512]), bins=4096, coarse=64)
    tensor([700, 512])
    """
    lowest = torch.minimum(last, torch.as_tensor(first, device=last.device))[:, None]
    stride = -(-bins // coarse)
    steps = torch.arange(0, -(-bins // stride) + 1, device=last.device)
    best = last[:, None]
    while True:
        # Descending, because argmin takes the first of equal costs.
        candidates = torch.minimum(torch.maximum(best - steps * stride, lowest), last[:, None])
        best = candidates.gather(1, cost(candidates).argmin(1, keepdim=True))
        if stride == 1:
            return best[:, 0]
        stride = -(-stride // _FINER)
        steps = torch.arange(-_FINER, _FINER + 1, device=last.device)


def magnitudes(fmt: Format, span: float, *, at_most: int) -> Tensor | None:
    """The codes of a format from 0 to `span`, float64; None if there are more than `at_most` such codes.

    >>> magnitudes(FLOAT4_E2M1FN, 6.0, at_most=16)
    tensor([0.0000, 0.5000, 1.0000, 1.5000, 2.0000, 3.0000, 4.0000, 6.0000],
           dtype=torch.float64)
    """
    grid = fmt.grid
    if grid.mantissa_bits is None:
        return torch.arange(span + 1, dtype=torch.float64, device="cpu") if span < at_most else None
    octave = torch.arange(1 << grid.mantissa_bits, dtype=torch.float64, device="cpu")
    spacing = 2.0 ** (grid.min_exponent - grid.mantissa_bits)
    # Subnormals have the spacing of the lowest octave.
    codes = [octave * spacing]
    while octave.numel() * spacing <= span and sum(map(len, codes)) <= at_most:
        codes.append((octave + octave.numel()) * spacing)
        spacing *= 2.0
    values = torch.cat(codes)
    values = values[values <= span]
    return values if values.numel() <= at_most else None


DEFAULT_BINS = 4096
_FEWEST_BINS, _MOST_BINS = 16, 1 << 16
_STATE_BYTES = 64 * 2**20
# Small enough that the allocator hands out the same pages again.
_SEARCH_BYTES = 16 * 2**20

# The exponent of a group that has seen zeros only: below every exponent of a width, so that any value replaces it.
_NO_EXPONENT = -(1 << 14)
# 2**-exponent must be a normal number in the dtype that counts.
_SMALLEST_EXPONENT = {torch.float32: -126, torch.float64: -1022}


class HistogramCalibrator(ExtremaCalibrator):
    """A calibrator that clips at a magnitude; its method finds that magnitude in a histogram.

    Both ends are clipped at one magnitude t: the range is max(lo, -t) to min(hi, t). So lo stays exactly 0 for values
    that are never negative, and an end closer to 0 than t stays. Under a symmetric specification with an unsigned
    format negative values become 0 whatever the range is; the search ignores them, and lo is 0.

    Args:
        spec: how the tensor will be quantized.
        num_bins: bins on either side of 0.0, a power of two from 16 to 65536. By default 4096, and fewer (not below
            `fewest_bins`) where there are so many groups that the counts would take more than 64 MiB.

    Raises:
        ConfigError: a number of bins that is not a power of two, or out of bounds.
    """

    keeps_range_and_counts = True
    fewest_bins: int = 128
    """The lowest default number of bins."""

    def __init__(self, spec: QuantSpec | str, *, num_bins: int | None = None) -> None:
        super().__init__(spec)
        if num_bins is not None and (not _FEWEST_BINS <= num_bins <= _MOST_BINS or num_bins & (num_bins - 1)):
            raise ConfigError(
                f"num_bins must be a power of two from {_FEWEST_BINS} to {_MOST_BINS}, such as {DEFAULT_BINS}; "
                f"got {num_bins}"
            )
        self.num_bins = num_bins
        self._counts = torch.zeros(0, 2, num_bins or DEFAULT_BINS, dtype=torch.int64, device="cpu")
        self._exponent = torch.zeros(0, dtype=torch.int32, device="cpu")
        self._inverse = torch.zeros(0, dtype=torch.float64, device="cpu")

    @abstractmethod
    def find_clip(self, histogram: Histogram) -> Tensor:
        """The number of bins of each group, counted from 0.0, that are not clipped, int64 [groups]; runs on the CPU."""

    def search_bytes(self, bins: int) -> int:
        """The memory that `find_clip` needs for one group, in bytes."""
        return 64 * bins

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute_range(self) -> Range:
        seen = self.seen
        # Sums of floats round differently on other devices; on the CPU the same counts give the same range.
        histogram = self._histogram().to("cpu")
        # As many groups at a time as the memory allows.
        parts = histogram.split(max(1, _SEARCH_BYTES // self.search_bytes(histogram.bins)))
        kept = torch.cat([self.find_clip(part) for part in parts])
        # (bins kept) * width is exact in float64, and in float32 too where the data was.
        limit = (kept * histogram.width).to(seen.lo.dtype).reshape(seen.lo.shape).to(seen.lo.device)
        lo = torch.zeros_like(seen.lo) if self.ignores_negative else torch.maximum(seen.lo, -limit)
        return Range(lo + 0.0, torch.minimum(seen.hi, limit))

    @property
    def ignores_negative(self) -> bool:
        """Whether quantization makes negative values 0 for every range, so that the search ignores them."""
        return self.spec.symmetric and not self.spec.format.signed

    def magnitudes(self, histogram: Histogram) -> Tensor:
        """The counts of each magnitude, int64 [groups, bins], without negative values if `ignores_negative`."""
        return histogram.counts[:, 1] if self.ignores_negative else histogram.counts.sum(1)

    def histogram(self) -> Histogram | None:
        if not self.observed:
            return None
        counts, exponent, (lo, hi) = self._histogram()
        return Histogram(counts.clone(), exponent.clone(), Range(lo.clone(), hi.clone()))

    def state_dict(self) -> dict[str, Tensor]:
        if not self.observed:
            return {}
        return super().state_dict() | {"counts": self._counts.clone(), "exponent": self._exponent.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            check_keys(state, self._state_names())
            seen = read_range(state)
            counts, exponent = state["counts"], state["exponent"]
            groups = seen.lo.numel()
            expected = (groups, 2, self._bins(groups))
            if counts.shape != expected or exponent.shape != (groups,) or counts.dtype != torch.int64:
                raise CalibrationError(
                    f"a calibrator state with {counts.dtype} counts of shape {list(counts.shape)} and exponents of "
                    f"shape {list(exponent.shape)}, expected torch.int64 of shape {list(expected)} and {[groups]}; "
                    "load it into a calibrator with the same num_bins"
                )
            if exponent.is_floating_point() or bool((counts < 0).any() | (counts.sum((1, 2)) < 1).any()):
                raise CalibrationError(
                    f"a calibrator state with counts of at least {counts.min().item()}, {int(counts.sum())} in total, "
                    f"and {exponent.dtype} exponents; expected counts >= 0, at least one in every group, and whole "
                    "exponents; load what state_dict returned"
                )
            self._seen, self._counts = seen, counts.clone(memory_format=torch.contiguous_format)
            self._set_exponent(exponent.to(torch.int32, copy=True))
        else:
            super().load_state_dict(state)

    def _state_names(self) -> tuple[str, ...]:
        return "lo", "hi", "counts", "exponent"

    def _histogram(self) -> Histogram:
        return Histogram(self._counts, self._exponent, Range(*(values.reshape(-1) for values in self.seen)))

    def _bins(self, groups: int) -> int:
        if self.num_bins is not None:
            return self.num_bins
        # The largest power of two of int64 counts, on two sides, that fits the budget.
        fitting = 1 << max(1, _STATE_BYTES // (2 * 8 * groups)).bit_length() - 1
        return max(self.fewest_bins, min(DEFAULT_BINS, fitting))

    def _known_bins(self) -> Bins | None:
        return Bins(self._inverse, self._counts.shape[2]) if self.observed else None

    def _known_counts(self) -> Tensor | None:
        return self._counts if self.observed else None

    def _count(self, batch: Batch) -> None:
        amax = batch.range.amax.reshape(-1)
        bins = self._bins(amax.numel())
        self._grow(_exponent(amax, bins), bins)
        counts = observe(batch.values, Bins(self._inverse, bins)).counts
        assert counts is not None, "there are bins"
        self._counts += counts.to(self._counts.device)

    def _absorb(self, other: Any) -> None:
        groups, _, bins = other._counts.shape
        if self._bins(groups) != bins:
            raise ConfigError(
                f"cannot merge counts of {bins} bins into {self._bins(groups)}; give both calibrators the same num_bins"
            )
        self._grow(other._exponent, bins)
        shift = self._exponent - other._exponent.to(self._exponent.device)
        self._counts = self._counts + join_bins(other._counts.to(self._counts.device), shift)

    def _grow(self, exponent: Tensor, bins: int) -> None:
        """Widen the bins to at least these exponents; the first call makes the bins."""
        if not self.observed:
            self._counts = torch.zeros(exponent.numel(), 2, bins, dtype=torch.int64, device=exponent.device)
            self._exponent = torch.full_like(exponent, _NO_EXPONENT)
        wider = torch.maximum(self._exponent, exponent.to(self._exponent.device))
        self._counts = join_bins(self._counts, wider - self._exponent)
        self._set_exponent(wider)

    def _set_exponent(self, exponent: Tensor) -> None:
        self._exponent = exponent
        # 0.0 for groups that have seen zeros only.
        self._inverse = power_of_two_or_zero(-exponent)


def _exponent(amax: Tensor, bins: int) -> Tensor:
    """The smallest exponent whose bins reach beyond amax, int32 [groups]: amax falls into their upper half."""
    exponent = torch.frexp(amax).exponent - (bins.bit_length() - 1)
    smallest = _SMALLEST_EXPONENT[amax.dtype]
    return torch.where(amax > 0, exponent.clamp(min=smallest), _NO_EXPONENT).to(torch.int32)


_COARSE = 64
# Bytes per threshold and bin: float32 values and errors.
_BYTES = 8


@register_calibrator("mse")
class MseCalibrator(HistogramCalibrator):
    """The calibrator "mse": the threshold with the smallest mean squared error.

    `fakequant.fake_quantize` quantizes the middle of every bin under the specification itself, for every format and
    arithmetic, and the squared errors are weighted with the counts. The thresholds tried are edges of bins and the
    largest magnitude: first 64 at equal distances, then the neighbours of the best. If errors are equal, the largest
    threshold wins.

    Args:
        spec: how the tensor will be quantized.
        num_bins: see `HistogramCalibrator`.

    >>> calibrator = MseCalibrator("int4")
    >>> calibrator.observe(torch.randn(10000, generator=torch.Generator().manual_seed(0)))
    >>> 2.3 < calibrator.compute_range().hi.item() < 3.0
    True
    """

    def search_bytes(self, bins: int) -> int:
        return _BYTES * (_COARSE + 1) * 2 * bins

    def find_clip(self, histogram: Histogram) -> Tensor:
        error, last = _SquaredError(self, histogram), used_bins(self.magnitudes(histogram))
        return cheapest(error, 1, last, bins=histogram.bins, coarse=_COARSE)


class _SquaredError:
    """Computes squared errors of thresholds in units of bins; a bin is a power of two, which changes no rounding."""

    def __init__(self, calibrator: HistogramCalibrator, histogram: Histogram) -> None:
        self.ignores_negative = calibrator.ignores_negative
        # Every row is a candidate threshold.
        self.spec = calibrator.spec.replace(granularity=PerChannel(0))
        centers = torch.arange(histogram.bins, dtype=torch.float32, device=histogram.counts.device) + 0.5
        if self.ignores_negative or not histogram.counts[:, 0].any():
            self.centers, self.counts = centers, histogram.counts[:, 1]
        else:
            self.centers, self.counts = torch.cat([-centers.flip(0), centers]), histogram.line()[1]
        width = torch.where(histogram.width > 0, histogram.width, 1.0)
        self.seen = Range(*((values / width)[:, None].float() for values in histogram.range))

    def __call__(self, kept: Tensor) -> Tensor:
        """The sum of squared errors if `kept` bins are not clipped, float64 [groups, n]."""
        limit = kept.to(torch.float32)
        lo = torch.zeros_like(limit) if self.ignores_negative else torch.maximum(self.seen.lo, -limit)
        hi = torch.minimum(self.seen.hi, limit)
        # Where there are only zeros every range serves, but that of one bin has a finite scale in every arithmetic.
        hi = torch.where(lo < hi, hi, 1.0)
        params = choose_qparams(Range(lo.reshape(-1, 1), hi.reshape(-1, 1)), self.spec)
        x = self.centers.expand(kept.numel(), -1)
        error = fake_quantize(x, self.spec, scale=params.scale, zero_point=params.zero_point).sub_(x)
        weights = self.counts[:, None].to(torch.float32)
        # In place and in float32, except the sum: new float64 arrays of this size cost ten times the arithmetic.
        return error.square_().view(*kept.shape, -1).mul_(weights).sum(-1, dtype=torch.float64)


# Keeps the product of a count's remainder and the numerator below 2**62.
_LARGEST_DENOMINATOR = 1 << 31


@register_calibrator("percentile")
class PercentileCalibrator(HistogramCalibrator):
    """The calibrator "percentile": the smallest threshold that at least `percentile` % of magnitudes do not exceed.

    Both ends are clipped at that threshold, so that at both together at most 100 - `percentile` % of the values are
    clipped. The threshold is the upper edge of a bin, and never more than was seen: 100 gives exactly the range of
    "max".

    Args:
        spec: how the tensor will be quantized.
        percentile: more than 1, up to 100; a share, such as 0.999, is refused.
        num_bins: see `HistogramCalibrator`.

    Raises:
        ConfigError: a percentile that is not in (1, 100].

    >>> calibrator = PercentileCalibrator("int8", percentile=90)
    >>> calibrator.observe(torch.tensor([-1.0] * 9 + [1000.0]))
    >>> calibrator.compute_range()
    Range(lo=tensor([-1.]), hi=tensor([1.2500]))
    """

    def __init__(self, spec: QuantSpec | str, *, percentile: float = 99.99, num_bins: int | None = None) -> None:
        super().__init__(spec, num_bins=num_bins)
        # 1 too: as a share it means all values, as a percentage hardly any.
        if not 1 < percentile <= 100:
            raise ConfigError(f"percentile {percentile}: expected a percentage above 1, such as 99.9, and at most 100")
        self.percentile = percentile

    def find_clip(self, histogram: Histogram) -> Tensor:
        below = self.magnitudes(histogram).cumsum(-1)
        total = below[:, -1]
        # In whole numbers, from the decimal that was written: 99.9 % of 1000 values are 999, not 999.0000000000001.
        share = (Fraction(str(self.percentile)) / 100).limit_denominator(_LARGEST_DENOMINATOR)
        whole, rest = total // share.denominator, total % share.denominator
        needed = whole * share.numerator + (rest * share.numerator + share.denominator - 1) // share.denominator
        return (below < needed.clamp(min=1)[:, None]).sum(-1) + 1


_COARSE_ENTROPY, _FEWEST_COARSE = 512, 64
# Thresholds times cells that are searched together, per group: 1 MiB for each array of float64.
_TABLE = 1 << 17
# With fewer bins per code, a cell would have nothing to merge.
_BINS_PER_CODE = 8
# Arrays of float64 or int64, one value per threshold and cell, that a search holds at a time.
_ARRAYS = 8


@register_calibrator("entropy")
class EntropyCalibrator(HistogramCalibrator):
    """The calibrator "entropy": the threshold with the smallest Kullback-Leibler divergence of the histograms.

    For a threshold, P is the histogram of the bins below it; the counts of the clipped bins are added to its last bin
    that is not empty. Q is the histogram without the clipped counts: the counts of each cell (all magnitudes that
    become one code of the format) are spread evenly over the bins of the cell that are not empty. The threshold with
    the smallest KL(P || Q) is taken; if several are equal, the largest. Bin 0 counts as much as its neighbour: it holds
    the exact zeros (of a ReLU, often half of the data), which have an exact code whatever the threshold is. Thresholds
    are edges of bins. The lowest keeps as many bins that are not empty as there are codes on one side of 0: fewer bins
    could each have a code, and Q would equal P whatever was clipped. Up to 512 thresholds are all tried (fewer for
    formats of more than 8 bits), of more every n-th and then the neighbours of the best. The search takes 2 to 5 ms for
    each group: about 10 s for a tensor with 4,000 channels.

    Args:
        spec: how the tensor will be quantized.
        num_bins: see `HistogramCalibrator`.

    Raises:
        ConfigError: the format has more codes on one side of 0 than there are bins.

    Source: Migacz, "8-bit inference with TensorRT", GTC 2017; the treatment of bin 0 and of equal divergences as in
    NVIDIA's pytorch-quantization.

    >>> calibrator = EntropyCalibrator("int8")
    >>> calibrator.observe(torch.randn(10000, generator=torch.Generator().manual_seed(0)))
    >>> calibrator.observe(torch.tensor([20.0]))
    >>> calibrator.compute_range().hi.item() < 5.0
    True
    """

    def __init__(self, spec: QuantSpec | str, *, num_bins: int | None = None) -> None:
        super().__init__(spec, num_bins=num_bins)
        self._span = _span(self.spec)
        bins = num_bins or DEFAULT_BINS
        cells = _cells(self.spec.format, self._span, bins)
        if cells is None:
            raise ConfigError(
                "the method entropy needs at least one bin of the histogram for each code on one side of 0, but "
                f"{self.spec.format} has more such codes than the {bins} bins; use the method mse or percentile"
            )
        self._codes, self._midpoints = cells
        self._coarse = max(_FEWEST_COARSE, min(_COARSE_ENTROPY, _TABLE // self._codes))
        fewest = 1 << (_BINS_PER_CODE * self._codes - 1).bit_length()  # a power of two
        self.fewest_bins = min(DEFAULT_BINS, max(self.fewest_bins, fewest))

    def search_bytes(self, bins: int) -> int:
        sides = 1 if self.spec.symmetric else 2
        return 8 * _ARRAYS * sides * (self._coarse + 1) * (self._codes + 1)

    def find_clip(self, histogram: Histogram) -> Tensor:
        counts = self.magnitudes(histogram)[:, None] if self.spec.symmetric else histogram.counts
        used = used_bins(counts)
        divergence = _Divergence(counts, used, self._midpoints, self._span, self.spec.symmetric)
        last = used.amax(1)
        first = torch.minimum((divergence.filled.sum(1) < self._codes).sum(1), last)
        return cheapest(divergence, first, last, bins=histogram.bins, coarse=self._coarse)


@lru_cache(maxsize=64)
def _cells(fmt: Format, span: float, bins: int) -> tuple[int, Tensor] | None:
    """The number of codes on one side of 0.0, and the middles between them; None if there are more codes than bins."""
    codes = magnitudes(fmt, span, at_most=bins)
    return None if codes is None else (codes.numel(), (codes[:-1] + codes[1:]) * 0.5)


def _span(spec: QuantSpec) -> float:
    """The distance in codes from 0.0 to the threshold; with a zero point, between both ends of the range."""
    return spec.format.bound if spec.symmetric else spec.format.quant_max - spec.format.quant_min


class _Divergence:
    """Computes KL(P || Q) of thresholds from cumulative sums: a cell costs one difference, however many bins it has.

    With counts c, clipped counts O, cells of S counts in n bins that are not empty, N counts in all and C unclipped:
    KL = (sum P log P - sum P log Q) / N - log N + log C, where P is c (and c + O in the last bin) and Q is S / n.

    Args:
        counts: int64 [groups, sides, bins].
        used: bins up to the last that is not empty, int64 [groups, sides].
        midpoints: where cells end, in codes [cells - 1].
        span: codes from 0.0 to the threshold if `symmetric`, else over both sides.
    """

    def __init__(self, counts: Tensor, used: Tensor, midpoints: Tensor, span: float, symmetric: bool) -> None:
        counts = counts.to(torch.float64, copy=True)
        counts[..., 0] = counts[..., 1]
        self.counts, self.used, self.midpoints, self.span, self.symmetric = counts, used, midpoints, span, symmetric
        filled = counts > 0
        positions = torch.arange(counts.shape[-1], device=counts.device)
        # Entry k is about bins 0 to k - 1.
        self.mass = _from_zero(counts.cumsum(-1))
        self.filled = _from_zero(filled.cumsum(-1))
        self.self_information = _from_zero(torch.xlogy(counts, counts).cumsum(-1))
        self.last_filled = _from_zero(torch.where(filled, positions, -1).cummax(-1).values, first=-1)

    def __call__(self, kept: Tensor) -> Tensor:
        """The divergence if `kept` bins are not clipped, float64 [groups, n]."""
        ends = torch.minimum(kept[:, None], self.used[:, :, None])
        total = self.mass[..., -1].sum(1, keepdim=True)
        inside = self.mass.gather(-1, ends)
        clipped = self.mass[..., -1:] - inside
        last = self.last_filled.gather(-1, ends)
        last_count = self.counts.gather(-1, last.clamp(min=0))
        p_log_p = self.self_information.gather(-1, ends) - torch.xlogy(last_count, last_count)
        p_log_p += torch.xlogy(last_count + clipped, last_count + clipped)
        width = (kept if self.symmetric else ends.sum(1)).to(torch.float64)
        # A bin belongs to the cell that contains its middle.
        edges = (self.midpoints * width[..., None] / self.span - 0.5).ceil().to(torch.int64).clamp(min=0)
        edges = torch.minimum(edges[:, None], ends[..., None])
        edges = torch.cat([torch.zeros_like(ends)[..., None], edges, ends[..., None]], dim=-1)
        cell_mass = self._between(self.mass, edges)
        spread = self._between(self.filled, edges)
        log_q = torch.where(cell_mass > 0, (cell_mass / spread).log(), 0.0)
        cells = torch.arange(log_q.shape[-1], device=log_q.device)
        last_cell = torch.where(cell_mass > 0, cells, 0).amax(-1, keepdim=True)
        cross = (cell_mass * log_q).sum(-1) + clipped * log_q.gather(-1, last_cell)[..., 0]
        divergence = (p_log_p - cross).sum(1) / total - total.log() + inside.sum(1).log()
        # Counts that are clipped on a side without any bin kept: Q cannot hold them.
        impossible = ((clipped > 0) & (last < 0)).any(1)
        return torch.where(impossible, torch.inf, divergence.nan_to_num(nan=0.0, posinf=torch.inf))

    @staticmethod
    def _between(cumulative: Tensor, edges: Tensor) -> Tensor:
        return cumulative.gather(-1, edges.flatten(-2)).view(edges.shape).diff(dim=-1)


def _from_zero(cumulative: Tensor, first: int = 0) -> Tensor:
    return torch.nn.functional.pad(cumulative, (1, 0), value=first)
