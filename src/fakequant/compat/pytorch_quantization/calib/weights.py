"""Calibration of all weights of a model at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from fakequant.compat.pytorch_quantization.utils.quant_logging import logger

from .search import mse_amax, percentile_amax

__all__ = ["calibrate_weights"]


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
        return torch.tensor(0.0)
    counts, edges = np.histogram(magnitudes, bins=num_bins, range=(0, largest))
    if method == "percentile":
        return percentile_amax(counts, edges, percentile)
    return mse_amax(counts, edges, quantizer.num_bits, quantizer.unsigned)  # pyright: ignore[reportArgumentType]
