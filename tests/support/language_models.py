"""Tiny language models of transformers, made from a configuration, for tests of delivered files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq
from tests.support.vision import import_torchvision

IDS = torch.arange(32).view(1, 32)
BATCHES: list[dict[str, Tensor | bool]] = [{"input_ids": IDS, "use_cache": False}]

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What transformers takes for granted where it reads a GGUF file, because the file does not say it.
OWN = {
    "gpt2": {"max_position_embeddings": 1024, "num_key_value_heads": 4},
    "qwen3": {"head_dim": 128},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 128, "norm_topk_prob": True},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 6},
}


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32, **values: Any) -> nn.Module:
    import_torchvision()  # transformers imports it
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**{**sizes, **heads, **values}, tie_word_embeddings=tied, pad_token_id=0)
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def mixtral(**values: Any) -> nn.Module:
    import_torchvision()
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **heads, "pad_token_id": 0, **values})).eval()


def llava() -> Any:
    """A model of images and text, whose files name layers otherwise than the model."""
    import_torchvision()
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    words = LlamaConfig(vocab_size=64, num_hidden_layers=2, pad_token_id=0, **sizes)
    images = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    made = LlavaConfig(vision_config=images, text_config=words, image_token_index=63, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(made).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**BATCHES[0]).logits
    return found


def language_model(kind: str, **values: Any) -> Any:
    """A model by its `model_type`; norms and biases are not what they are by default."""
    import_torchvision()  # transformers imports it
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **OWN.get(kind, {}), **values})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def prepared(kind: str, weight: str, **values: Any) -> Any:
    rules = [fq.Rule("*", weight=fq.TensorConfig(weight))]
    return fq.prepare(language_model(kind, **values), fq.Config("own rules", rules), skip=[])
