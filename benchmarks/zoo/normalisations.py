"""Batch normalisations of timm that `fuse_batch_norm` leaves although a convolution or linear layer is before them.

`python -m benchmarks.zoo.normalisations` takes one small network of each of the first 60 families that have any, with
random weights, and prints a line for each that has such normalisations left.
"""

from __future__ import annotations

import warnings

import torch

import fakequant as fq
from fakequant.model.training.fuse import find_fusions, is_norm
from tests.support.vision import import_torchvision

_FAMILIES = 60
_LARGE = 60e6
"""Parameters from which a network is not tried."""
_MEANT = ("its input is not the output of", "it is never called", "used elsewhere, too", "is called")
"""Reasons that lie in the order of layers."""


def main() -> None:
    import_torchvision()  # timm imports it
    import timm

    torch.manual_seed(0)
    seen: set[str] = set()
    fused = wrong = 0
    for name in timm.list_models():
        family = timm.models._registry._model_to_module[name]
        if family in seen or len(seen) == _FAMILIES:
            continue
        try:
            with torch.device("meta"):  # a network that is too large takes no memory and no time
                size_of = sum(p.numel() for p in timm.create_model(name, num_classes=10).parameters())
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            size_of = 0  # it computes while it is made
        if size_of > _LARGE:
            continue
        try:
            model = timm.create_model(name, num_classes=10).eval()
        except (RuntimeError, TypeError, ValueError) as error:
            print(f"{name}: not made, {type(error).__name__}")
            continue
        parameters = sum(p.numel() for p in model.parameters())
        if parameters > _LARGE or not any(map(is_norm, model.modules())):
            continue
        size = model.default_cfg["input_size"]
        x = torch.randn(1, *size)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            found = find_fusions(model, x)
            left = {path: why for path, why in found.left.items() if not any(word in why for word in _MEANT)}
            before = model(x)
            after = fq.fuse_batch_norm(model, x)(x)
        gap = float((before - after).abs().max() / before.abs().max()) if isinstance(before, torch.Tensor) else 0.0
        seen.add(family)
        fused, wrong = fused + len(found.fused), wrong + len(left)
        print(
            f"{name}: {len(found.fused)} fused, {len(left)} left wrongly, output moved by {gap:.1e} {left}", flush=True
        )
    print(f"{len(seen)} families: {fused} fused, {wrong} left where a convolution or linear layer is before them")


if __name__ == "__main__":
    main()
