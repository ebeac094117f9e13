"""Models of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.vision import import_torchvision

from .architecture import Architecture, Built, images


def _classifier(name: str, size: int = 64, **options: Any) -> Architecture:
    """A model of `torchvision.models` by its name there, on images of some size."""

    def build() -> Built:
        model = import_torchvision().models.get_model(name, weights=None, **options)
        return model, [images(size), images(size)]

    return Architecture(f"tv {name}", build)


def _vit() -> Built:
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    model = import_torchvision().models.VisionTransformer(**sizes, num_classes=10)
    torch.nn.init.normal_(model.heads.head.weight, std=0.02)  # zeros by default
    return model, [images(32), images(32)]


def _maxvit() -> Built:
    model = import_torchvision().models.MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=2,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.1,
        num_classes=10,
    )
    return model, [images(64), images(64)]


def _video() -> Built:
    model = import_torchvision().models.get_model("r3d_18", weights=None, num_classes=10)
    return model, [torch.randn(2, 3, 4, 32, 32) for _ in range(2)]


def _segmentation(name: str) -> Callable[[], Built]:
    def build() -> Built:
        model = import_torchvision().models.get_model(name, weights=None, weights_backbone=None, num_classes=5)
        return model, [images(64), images(64)]

    return build


def _flow() -> Built:
    model = import_torchvision().models.get_model("raft_small", weights=None)
    batch = lambda: {"image1": images(128, 1), "image2": images(128, 1), "num_flow_updates": 2}  # noqa: E731
    return model, [batch(), batch()]


def _detector(name: str) -> Callable[[], Built]:
    """A detector; its batches hold targets too, which training needs and evaluation leaves out."""

    def build() -> Built:
        options = {"weights": None, "weights_backbone": None, "num_classes": 5, "min_size": 64, "max_size": 64}
        model = import_torchvision().models.get_model(name, **options)
        target = {"boxes": torch.tensor([[5.0, 5.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
        batches = [{"images": list(images(64)), "targets": [target, target]} for _ in range(2)]
        return model, batches

    return build


ARCHITECTURES = [
    _classifier("resnet18"),
    _classifier("mobilenet_v3_small"),
    _classifier("efficientnet_b0"),
    _classifier("convnext_tiny"),
    _classifier("densenet121"),
    _classifier("shufflenet_v2_x0_5"),
    _classifier("squeezenet1_1"),
    _classifier("regnet_x_400mf"),
    _classifier("vgg11", num_classes=10),
    _classifier("mnasnet0_5"),
    _classifier("inception_v3", 96, aux_logits=False, init_weights=False),
    _classifier("googlenet", 64, init_weights=False),
    Architecture("tv vit_b_16", _vit),
    Architecture("tv maxvit", _maxvit),
    _classifier("swin_t"),
    _classifier("swin_v2_t"),
    Architecture("tv deeplabv3_mobilenet", _segmentation("deeplabv3_mobilenet_v3_large")),
    Architecture("tv lraspp_mobilenet", _segmentation("lraspp_mobilenet_v3_large")),
    Architecture("tv r3d_18", _video),
    Architecture("tv raft_small", _flow),
    Architecture("tv fcos", _detector("fcos_resnet50_fpn")),
    Architecture("tv fasterrcnn", _detector("fasterrcnn_mobilenet_v3_large_320_fpn")),
]
