"""torchvision for tests."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_DECLARED: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """torchvision, beside a torch that its compiled operators were not built for: they are declared only."""
    if not _DECLARED:
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:  # "operator torchvision::nms does not exist"
            if "torchvision::nms" not in str(error):
                raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)
    return importlib.import_module("torchvision")
