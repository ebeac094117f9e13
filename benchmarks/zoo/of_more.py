"""Models of libraries that the extra `zoo` installs, where they are: diffusion, segmentation, graphs, adapters.

Those of speechbrain are left out: it needs torchaudio, of which there is no build for every torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.vision import import_torchvision

from .architecture import Architecture, Built, images, tokens


class _Sample(nn.Module):
    """A model of diffusers that returns its tensor alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.model(*args, **kwargs, return_dict=False)[0]


def _diffusers(name: str, batch: Callable[[], dict[str, Any]], **config: Any) -> Architecture:
    def build() -> Built:
        import_torchvision()  # these libraries import it
        model = getattr(import_module("diffusers"), name)(**config)
        return _Sample(model), [batch(), batch()]

    return Architecture(f"diffusers {name}", build)


def _steps(count: int = 2) -> Tensor:
    return torch.randint(0, 1000, (count,))


def _flux() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.rand(1),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
    }


def _sd3() -> dict[str, Any]:
    return {
        "hidden_states": images(16, channels=4),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 64),
        "timestep": _steps(),
    }


_BLOCKS = {"block_out_channels": (32, 64), "norm_num_groups": 8}
_DIFFUSERS = [
    _diffusers(
        "UNet2DModel",
        lambda: {"sample": images(16), "timestep": _steps()},
        sample_size=16,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **_BLOCKS,
    ),
    _diffusers(
        "DiTTransformer2DModel",
        lambda: {"hidden_states": images(16, channels=4), "timestep": _steps(), "class_labels": _steps() % 10},
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=1,
        sample_size=16,
        num_embeds_ada_norm=10,
    ),
    _diffusers(
        "SD3Transformer2DModel",
        _sd3,
        sample_size=16,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    ),
    _diffusers(
        "FluxTransformer2DModel",
        _flux,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ),
    _diffusers(
        "AutoencoderKL",
        lambda: {"sample": images(16)},
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        **_BLOCKS,
    ),
]


class _Graph(nn.Module):
    """Two convolutions over a graph, whose edges come with its nodes."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(x, edges).relu(), edges)


def _graph(name: str, make: Callable[[Any, int, int], nn.Module]) -> Architecture:
    def build() -> Built:
        library = import_module("torch_geometric.nn")
        model = _Graph(make(library, 8, 16), make(library, 16, 4))
        return model, [(torch.randn(12, 8), torch.randint(0, 12, (2, 40))) for _ in range(2)]

    return Architecture(f"torch_geometric {name}", build)


_GRAPHS = [
    _graph("GATConv", lambda library, inner, outer: library.GATConv(inner, outer)),
    _graph("GINConv", lambda library, inner, outer: library.GINConv(nn.Sequential(nn.Linear(inner, outer), nn.ReLU()))),
    _graph("TransformerConv", lambda library, inner, outer: library.TransformerConv(inner, outer)),
]


def _segmentation(name: str) -> Architecture:
    def build() -> Built:
        import_torchvision()
        library = import_module("segmentation_models_pytorch")
        return getattr(library, name)("resnet18", encoder_weights=None, classes=2), [images(64), images(64)]

    return Architecture(f"segmentation_models_pytorch {name}", build)


def _lora() -> Built:
    import_torchvision()
    peft, hub = import_module("peft"), import_module("transformers")
    config = hub.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    model = peft.get_peft_model(hub.LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model, [{"input_ids": tokens(), "use_cache": False, "return_dict": True} for _ in range(2)]


_ALL = {
    "diffusers": _DIFFUSERS,
    "torch_geometric": _GRAPHS,
    "segmentation_models_pytorch": [_segmentation(name) for name in ("Unet", "FPN", "DeepLabV3Plus")],
    "peft": [Architecture("peft LoRA of Llama", _lora)],
}
ARCHITECTURES = [one for library, found in _ALL.items() if find_spec(library) for one in found]
