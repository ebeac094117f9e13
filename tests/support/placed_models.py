"""Small models of other packages, in which the tables of engines place quantizers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.support.vision import import_torchvision

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(12).view(2, 6)


def resnet() -> nn.Module:
    made = import_torchvision().models.resnet
    return made.ResNet(made.BasicBlock, [1, 1, 1, 1], num_classes=10)


def mobilenet() -> nn.Module:
    made = import_torchvision().models.mobilenetv3
    block = partial(made.InvertedResidualConfig, dilation=1, width_mult=1)
    settings = [block(16, 3, 16, 16, True, "RE", 2), block(16, 3, 24, 24, False, "RE", 1)]
    settings += [block(24, 5, 32, 24, True, "HS", 1)]
    return made.MobileNetV3(settings, last_channel=32, num_classes=10)


def densenet() -> nn.Module:
    models = import_torchvision().models
    return models.DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=10)


def vit() -> nn.Module:
    """A model whose token and head are not the zeros that it starts from, which have no range."""
    model = import_torchvision().models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=10)
    for start in (model.class_token, model.heads.head.weight):
        nn.init.normal_(start, std=0.02)
    return model


def bert(attention: str = "eager") -> nn.Module:
    import_torchvision()
    from transformers import BertConfig, BertModel

    sizes: dict[str, int] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=20, intermediate_size=32, attn_implementation=attention, **sizes))


MODELS: dict[str, Any] = {"resnet": resnet, "mobilenet": mobilenet, "densenet": densenet, "vit": vit, "bert": bert}
