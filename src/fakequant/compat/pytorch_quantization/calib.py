"""Calibrators: from batches of tensors to an amax."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from fakequant.compat.pytorch_quantization.search import entropy_amax, mse_amax, percentile_amax
from fakequant.compat.pytorch_quantization.specification import NumBits
from fakequant.compat.pytorch_quantization.utils import logger, reduce_amax
from fakequant.errors import CalibrationError

__all__ = ["HistogramCalibrator", "MaxCalibrator", "_Calibrator", "calibrate_weights"]


def __getattr__(name: str) -> ModuleType:
    """The submodule `max` of the original, as a global of this file, would hide the built-in function."""
    if name != "max":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return sys.modules[__name__]


class _Calibrator:
    """Collects statistics of tensors and computes an amax.

    Args:
        num_bits: bits of a code.
        axis: the axis or axes that keep one amax per index; None for one amax in all.
        unsigned: whether codes begin at 0.
    """

    def __init__(self, num_bits: NumBits, axis: int | tuple[int, ...] | None, unsigned: bool) -> None:
        self._num_bits = num_bits
        self._axis = axis
        self._unsigned = unsigned
        self._told: set[str] = set()

    def collect(self, x: Tensor) -> None:
        """Collect a tensor."""
        raise NotImplementedError

    def reset(self) -> None:
        """Discard all collected data."""
        raise NotImplementedError

    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the amax of the collected data, or None if there is none."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"num_bits={self._num_bits} axis={self._axis} unsigned={self._unsigned}"

    def _tell(self, message: str) -> None:
        """Log a warning the first time."""
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)


class MaxCalibrator(_Calibrator):
    """Collects the largest magnitude of all tensors.

    Args:
        num_bits: bits of a code.
        axis: the axis or axes that keep one amax per index; negative ones count from the end.
        unsigned: whether codes begin at 0; negative values then only cause a warning.
        track_amax: whether to keep the amax of every tensor in `amaxs`.

    >>> calibrator = MaxCalibrator(8, 0, False)
    >>> calibrator.collect(torch.tensor([[1.0, -3.0], [0.5, 0.25]]))
    >>> calibrator.collect(torch.tensor([[2.0, 2.0], [2.0, 2.0]]))
    >>> calibrator.compute_amax()
    tensor([[3.],
            [2.]])
    """

    def __init__(
        self,
        num_bits: NumBits,
        axis: int | tuple[int, ...] | None,
        unsigned: bool,
        track_amax: bool = False,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        self._track_amax = track_amax
        self._amaxs: list[np.ndarray] = []
        self._calib_amax: Tensor | None = None

    @property
    def amaxs(self) -> list[np.ndarray]:
        """The amax of every collected tensor if `track_amax` is set."""
        return self._amaxs

    @torch.inference_mode(False)
    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Collect a tensor.

        Raises:
            RuntimeError: amax has another shape than for the tensors before, or the tensor has no elements.
            IndexError: an axis that it does not have.
        """
        axes = self._axis if isinstance(self._axis, list | tuple) else [] if self._axis is None else [self._axis]
        if beyond := [axis for axis in axes if not -x.dim() <= axis < x.dim()]:
            raise IndexError(f"axis {beyond[0]} is out of range for a tensor of shape {list(x.shape)}")
        kept = {axis % x.dim() for axis in axes}
        amax = reduce_amax(x.detach(), [axis for axis in range(x.dim()) if axis not in kept])
        if self._unsigned and x.numel() and bool((x < 0).any()):
            self._tell("Calibrator encountered negative values, although codes are unsigned; is this the right tensor?")
        if bool(amax.isnan().any()):
            self._tell("Calibrator encountered NaN, so amax is NaN; repair the layer that makes it.")
        if self._track_amax:
            self._amaxs.append(amax.cpu().float().numpy())
        if self._calib_amax is not None:
            if amax.shape != self._calib_amax.shape:
                raise RuntimeError(
                    f"amax shape changed! It was {list(self._calib_amax.shape)} and is {list(amax.shape)} for a tensor "
                    f"of shape {list(x.shape)}; collect tensors of one layout"
                )
            amax = torch.maximum(self._calib_amax, amax.to(self._calib_amax.device))
        self._calib_amax = amax

    def reset(self) -> None:
        """Discard all collected data."""
        self._calib_amax = None

    def compute_amax(self) -> Tensor | None:
        """Return a copy of the largest magnitude, or None if nothing was collected."""
        return None if self._calib_amax is None else self._calib_amax.clone()

    def __str__(self) -> str:
        return f"MaxCalibrator(track_amax={self._track_amax})"

    def __repr__(self) -> str:
        tracked = f" amaxs={self._amaxs}" if self._track_amax else ""
        amax = f" calib_amax={self._calib_amax} track_amax={self._track_amax}{tracked}"
        return f"MaxCalibrator({super().__repr__()}{amax})"


# Beyond this number of bins, half a MiB of counts, neighbours are merged instead of bins appended. The mse search
# quantizes every bin with every threshold, and takes seconds at this size.
_MOST_BINS = 1 << 16
# histc counts in float32, which is exact up to this number.
_EXACT_COUNTS = 1 << 24


class HistogramCalibrator(_Calibrator):
    """How often magnitudes occurred, in bins of one width.

    The first tensor decides the width: `num_bins` bins from 0 to its largest magnitude. When a larger magnitude comes,
    bins of that width are appended; beyond 65,536 bins (or `num_bins`) neighbours are merged. Counts are exact.

    Args:
        num_bits: bits of a code.
        axis: None, because all values share a histogram.
        unsigned: whether codes begin at 0.
        num_bins: bins of the first tensor.
        grow_method: has no effect.
        skip_zeros: whether exact zeros do not count.
        torch_hist: count on the tensor's device. Otherwise by numpy, in bins from the smallest magnitude of the first
            tensor; smaller ones do not count.

    Raises:
        NotImplementedError: an axis.

    >>> calibrator = HistogramCalibrator(8, None, False)
    >>> calibrator.collect(torch.linspace(-1, 1, 1001))
    >>> print(calibrator)
    HistogramCalibrator(calib_bin_edges=[0.000, ..., 1.000](2049))
    >>> calibrator.compute_amax("percentile", percentile=90)
    tensor(0.8999)
    """

    def __init__(
        self,
        num_bits: NumBits,
        axis: int | tuple[int, ...] | None,
        unsigned: bool,
        num_bins: int = 2048,
        grow_method: str | None = None,
        skip_zeros: bool = False,
        torch_hist: bool = True,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        if axis is not None:
            raise NotImplementedError("Calibrator histogram collection only supports per tensor scaling")
        if grow_method is not None:
            self._tell(f"grow_method is deprecated and has no effect, got {grow_method}.")
        self._first_bins = self._num_bins = num_bins
        self._skip_zeros = skip_zeros
        self._torch_hist = torch_hist
        self._calib_bin_edges: Tensor | np.ndarray | None = None
        self._calib_hist: Tensor | np.ndarray | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Collect a tensor; NaN is ignored.

        Raises:
            CalibrationError: a tensor without elements; it is also a RuntimeError.
            OverflowError: the tensor holds inf.
        """
        if not x.numel():
            raise CalibrationError(f"nothing to collect in a tensor of shape {list(x.shape)}")
        x = x.detach().abs().float()
        if self._skip_zeros:
            x = x[x != 0]
        largest = x.max() if x.numel() else x.new_zeros(())
        if bool(largest.isnan()):
            self._tell("Calibrator encountered NaN, which does not count; repair the layer that makes it.")
            x = x[~x.isnan()]
            largest = x.max() if x.numel() else largest.zero_()
        if bool(largest.isinf()):
            raise OverflowError("a histogram cannot hold inf; repair the layer that makes it, or clamp the tensor")
        if not x.numel():
            return
        if self._torch_hist:
            self._count(x, largest)
        else:
            self._count_by_numpy(x.cpu().numpy())

    def reset(self) -> None:
        """Discard all collected data."""
        self._calib_bin_edges = self._calib_hist = None
        self._num_bins = self._first_bins

    def compute_amax(
        self, method: str, *, stride: int = 1, start_bin: int = 128, percentile: float = 99.99
    ) -> Tensor | None:
        """Return the amax of a method as a 0-d tensor on the CPU, or None if nothing was collected.

        Args:
            method: "entropy", "mse" or "percentile".
            stride: for entropy and mse, the distance in bins of two tested thresholds.
            start_bin: for entropy and mse, the first tested threshold.
            percentile: for percentile, the percentage of values that must not be clipped.

        Raises:
            TypeError: an unknown method.
            ValueError: a percentile that is not in [0, 100], or fewer bins than start_bin.
        """
        if method not in ("entropy", "mse", "percentile"):
            raise TypeError(f"Unknown calibration method {method}; known are entropy, mse and percentile")
        if method == "percentile" and not 0 <= percentile <= 100:
            raise ValueError(f"Invalid percentile {percentile}. Must be in range 0 <= percentile <= 100.")
        if self._calib_hist is None or self._calib_bin_edges is None:
            return None
        counts, edges = (torch.as_tensor(each).cpu().numpy() for each in (self._calib_hist, self._calib_bin_edges))
        if method == "percentile":
            return percentile_amax(counts, edges, percentile)
        search = entropy_amax if method == "entropy" else mse_amax
        return search(counts, edges, self._num_bits, self._unsigned, stride=stride, start_bin=start_bin)

    def _count(self, x: Tensor, largest: Tensor) -> None:
        edges, counts = self._calib_bin_edges, self._calib_hist
        if not isinstance(edges, Tensor) or not isinstance(counts, Tensor):
            self._calib_bin_edges = torch.linspace(0, largest.item(), self._num_bins + 1, device=x.device)
            self._calib_hist = _histogram(x, self._num_bins, largest.item())
            return
        edges, counts = edges.to(x.device), counts.to(x.device)
        if not bool(edges[-1]):
            # So far there were only zeros, which belong to bin 0 for any width.
            edges = torch.linspace(0, largest.item(), self._num_bins + 1, device=x.device)
        elif bool(largest > edges[-1]):
            width = edges[1] - edges[0]
            factor = _merged(largest.item() / width.item(), max(_MOST_BINS, self._first_bins))
            width, counts = width * float(factor), _merge(counts, factor)
            edges = torch.arange(0, (largest + width).item(), width.item(), device=edges.device)
            # Because of rounding there may be an edge too many or too few.
            if bool(edges[-1] < largest):
                edges = torch.cat([edges, edges[-1:] + width])
            elif bool(edges[-2] >= largest):
                edges = edges[:-1]
        self._num_bins = edges.numel() - 1
        found = _histogram(x, self._num_bins, edges[-1].item())
        found[: counts.numel()] += counts
        self._calib_bin_edges, self._calib_hist = edges, found

    def _count_by_numpy(self, values: np.ndarray) -> None:
        edges, counts = self._calib_bin_edges, self._calib_hist
        if not isinstance(edges, np.ndarray) or not isinstance(counts, np.ndarray):
            self._calib_hist, self._calib_bin_edges = np.histogram(values, bins=self._num_bins)
            return
        largest = values.max()
        if largest > edges[-1]:
            width = edges[1] - edges[0]
            factor = _merged(float((largest - edges[0]) / width), max(_MOST_BINS, self._first_bins))
            if factor > 1:
                counts, width = _merge(torch.from_numpy(counts), factor).numpy(), width * edges.dtype.type(factor)
                edges = edges[0] + width * np.arange(len(counts) + 1, dtype=edges.dtype)
            edges = np.hstack([edges, np.arange(edges[-1] + width, largest + width, width)])
        found, _ = np.histogram(values, bins=edges)
        found[: len(counts)] += counts
        self._calib_bin_edges, self._calib_hist = edges, found

    def __str__(self) -> str:
        edges = self._calib_bin_edges
        text = "None" if edges is None else f"[{edges[0]:.3f}, ..., {edges[-1]:.3f}]({len(edges)})"
        return f"HistogramCalibrator(calib_bin_edges={text})"

    def __repr__(self) -> str:
        counts = f"calib_bin_edges={self._calib_bin_edges} calib_hist={self._calib_hist}"
        return f"HistogramCalibrator({super().__repr__()} {counts})"


def _histogram(x: Tensor, bins: int, largest: float) -> Tensor:
    """Counts int64 [bins] of values from 0 to largest."""
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    if largest == 0:
        counts[0] = x.numel()
        return counts
    for part in x.reshape(-1).split(_EXACT_COUNTS):
        counts += torch.histc(part, bins=bins, min=0, max=largest).to(torch.int64)
    return counts


def _merged(bins: float, most: int) -> int:
    """Return the power of two of neighbours that must be merged to have at most `most` bins."""
    factor = 1
    while bins > most * factor:
        factor *= 2
    return factor


def _merge(counts: Tensor, factor: int) -> Tensor:
    factor = min(factor, counts.numel())
    return torch.nn.functional.pad(counts, (0, -counts.numel() % factor)).view(-1, factor).sum(1)


@torch.no_grad()
def calibrate_weights(
    model: nn.Module,
    method: str = "percentile",
    perchannel: bool = True,
    percentile: float = 99.99,
    num_bins: int = 2048,
) -> None:
    """Set the amax of the weight quantizer of every module that has one, from the weight.

    Args:
        model: modules with a `weight` and a `weight_quantizer` are calibrated; the calibrators of these are not used.
        method: "max", "percentile" or "mse".
        perchannel: one amax per output channel; otherwise one per weight.
        percentile: how many of 100 magnitudes may not be clipped.
        num_bins: bins of the histograms of magnitudes, from 0 to the largest.

    Raises:
        TypeError: another method.
    """
    if method not in ("max", "percentile", "mse"):
        raise TypeError(f"Unsupported calibration method {method}; known are max, percentile and mse")
    for name, module in model.named_modules():
        quantizer, weight = getattr(module, "weight_quantizer", None), getattr(module, "weight", None)
        if quantizer is None or not isinstance(weight, Tensor):
            continue
        logger.info("Calibrate weight of %s", name)
        axis = (1 if isinstance(module, _ConvTransposeNd) else 0) if perchannel else None
        magnitudes = weight.detach().abs().float().cpu()
        channels = magnitudes.reshape(1, -1) if axis is None else magnitudes.movedim(axis, 0).flatten(1)
        if method == "max":
            amax = channels.amax(1)
        else:
            amax = torch.stack([_amax(each.numpy(), quantizer, method, percentile, num_bins) for each in channels])
        shape = [] if axis is None else [-1 if each == axis else 1 for each in range(weight.dim())]
        quantizer.amax = amax.reshape(shape).numpy()


def _amax(magnitudes: np.ndarray, quantizer: nn.Module, method: str, percentile: float, num_bins: int) -> Tensor:
    largest = magnitudes.max()
    if largest == 0:
        return torch.tensor(0.0, device="cpu")
    counts, edges = np.histogram(magnitudes, bins=num_bins, range=(0, largest))
    if method == "percentile":
        return percentile_amax(counts, edges, percentile)
    return mse_amax(counts, edges, quantizer.num_bits, quantizer.unsigned)  # pyright: ignore[reportArgumentType]
