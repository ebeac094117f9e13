"""torchvision next to a torch that its compiled operators were not built for; for tests and `make zoo`."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

_DECLARED: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Imports torchvision, and declares its operators `nms` and `qnms` where its extension does not load.

    The extension is built for one version of torch. With another one it does not load, and the import fails, because
    torchvision registers shapes for operators that do not exist. `nms` is computed in Python then.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:  # "operator torchvision::nms does not exist"
        if "torchvision::nms" not in str(error) or _DECLARED:
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", _nms, "CPU")
    _DECLARED.append(library)  # it takes its operators with it when it is collected
    torchvision = importlib.import_module("torchvision")
    vars(importlib.import_module("torchvision.ops.boxes"))["_assert_has_ops"] = lambda: None
    return torchvision


def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes [N, 4] to keep, best score first: none overlaps a better one by more than the threshold."""
    corner, far = torch.maximum(boxes[:, None, :2], boxes[:, :2]), torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
    overlap = (far - corner).clamp(min=0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    too_much = overlap > iou_threshold * (area[:, None] + area - overlap)
    order = scores.argsort(descending=True, stable=True)
    too_much, kept = too_much[order][:, order].numpy(), []
    left = np.ones(len(order), dtype=bool)
    for place in range(len(order)):
        if left[place]:
            kept.append(place)
            left &= ~too_much[place]
    return order[kept]
