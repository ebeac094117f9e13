"""Set the statistics of batch normalisations to those of the quantized model, without training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model
from fakequant.data.batches import Batches, Forward, Inputs, input_named
from fakequant.distributed import Ranks, refuse_sharded
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, warn_user
from fakequant.model.weights import evaluating
from fakequant.nn.quantized.folded import FoldedNorm
from fakequant.ptq.stream import Stream, call_order, check_side_by_side
from fakequant.restore import restore_on_error, state_of


def reestimate_batch_norm(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
) -> list[str]:
    """Set the statistics of all batch normalisations to those of the quantized model.

    The statistics are the mean and the unbiased variance over all positions of all batches together, not a mean over
    batches. Each normalisation is set before later layers run, so that their inputs are computed with final statistics.

    Args:
        model: a prepared and calibrated model whose normalisations are not merged into convolutions.
        batches: as from a data loader; they are stored in a list and run side by side.
        inputs, forward: as for `calibrate`.

    Returns:
        The paths of the normalisations that were set. Those that no batch reaches keep their statistics.

    Raises:
        ConfigError: the model has no batch normalisation with statistics.
        CalibrationError: there are no batches, an input has a single position in all of them, or an input holds NaN or
            inf (the layer is named).

    The model is unchanged after any error or interrupt.

    >>> model = nn.Sequential(nn.BatchNorm1d(1))
    >>> reestimate_batch_norm(model, [torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0], [7.0]])])
    ['0']
    >>> model[0].running_mean, model[0].running_var
    (tensor([4.]), tensor([8.6667]))
    """
    check_model(model, "reestimate_batch_norm", "reestimate_batch_norm(model, batches)")
    refuse_sharded(model, "estimate the statistics of")
    given = Batches(batches, "reestimate_batch_norm", inputs=inputs, forward=forward).kept()
    norms: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    }
    if folded := [name for name, norm in norms.items() if isinstance(norm, FoldedNorm)]:
        raise ConfigError(
            f"{len(folded)} batch normalisations are folded into layers (the first is {folded[0]}), so that new "
            "statistics would change the weights; update the statistics by fine-tuning"
        )
    if not norms:
        raise ConfigError(
            "the model has no batch normalisation with statistics; call reestimate_batch_norm before they are merged"
        )
    with restore_on_error(state_of(norms.values())), evaluating(model), torch.no_grad():
        recorded = call_order(model, norms, given)
        check_side_by_side(model, norms, given, recorded)
        with Stream(model, norms, given, recorded) as stages:
            for stage in stages:
                if not stage.is_first:
                    continue
                sums = _Sums(stage.name)
                for number, calls in stage.calls.items():
                    with input_named(stage.name, number):
                        for call in calls:
                            sums.add(call.first)
                sums.set(norms[stage.name])
    if repeated := recorded.parts(Ranks(None))[1]:
        warn_user(
            f"{repeated[0]} is called several times in a batch: its earlier calls used the old statistics, which "
            "changed the inputs of later layers; call reestimate_batch_norm again until the statistics settle",
            CalibrationWarning,
        )
    return [name for name in norms if name in recorded.order]


class _Sums:
    """The number of positions, and per channel the mean and the sum of squared distances from the mean, in float64."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.count = 0
        self.mean = self.squares = torch.zeros((), device="cpu")

    def add(self, x: Tensor) -> None:
        """Add all positions of x [n, channels, ...], as Chan et al. merge sums, which avoids cancellation."""
        if not bool(x.isfinite().all()):
            raise CalibrationError("an input holds NaN or inf; leave the batch out")
        rows = x.double().movedim(1, -1).reshape(-1, x.shape[1])
        if not len(rows):
            return
        mean = rows.mean(0)
        squares = (rows - mean).square().sum(0)
        total, gap = self.count + len(rows), mean - self.mean
        self.squares = self.squares + squares + gap * gap * (self.count * len(rows) / total)
        self.mean = self.mean + gap * (len(rows) / total)
        self.count = total

    def set(self, norm: Any) -> None:
        """Copy the mean and the unbiased variance into a normalisation."""
        if self.count < 2:
            raise CalibrationError(
                f"{self._name} got fewer than two positions, so there is no variance; pass more examples"
            )
        norm.running_mean.copy_(self.mean)
        norm.running_var.copy_(self.squares / (self.count - 1))
