"""Models of timm."""

from __future__ import annotations

from typing import Any

from tests.support.vision import import_torchvision

from .architecture import Architecture, Built, images


def _model(name: str, size: int = 64, **options: Any) -> Architecture:
    """A model of timm by its name there, on images of some size."""

    def build() -> Built:
        import_torchvision()  # timm imports it
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10, **options), [images(size), images(size)]

    return Architecture(f"timm {name}", build)


def _vit(name: str, **options: Any) -> Architecture:
    """A vision transformer of timm with two blocks, on images of 64 pixels."""
    return _model(name, img_size=64, depth=2, **options)


ARCHITECTURES = [
    _model("convnextv2_atto"),
    _model("test_convnext3"),
    _model("test_vit", 160),
    _model("test_nfnet", 96),
    _model("test_mambaout", 96),
    _model("hrnet_w18_small"),
    _model("regnety_002"),
    _model("efficientformer_l1", 224),
    _model("tf_efficientnet_b0"),
    _model("mobilenetv4_conv_small"),
    _model("resnetv2_50x1_bit"),
    _model("ghostnet_050"),
    _model("fastvit_t8"),
    _model("repvgg_a0"),
    _model("mixer_s32_224", 224),
    _vit("vit_tiny_patch16_224"),
    _vit("eva02_tiny_patch14_224", patch_size=16),
    _vit("beit_base_patch16_224", embed_dim=96, num_heads=3),
    _vit("xcit_nano_12_p8_224"),
    _model("maxvit_rmlp_pico_rw_256", 64, img_size=64),
]
