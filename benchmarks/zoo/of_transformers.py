"""Models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.vision import import_torchvision

from .architecture import Architecture, Built, images, tokens

Batch = dict[str, Any]
Options = dict[str, Any]

# Two layers of 64 channels. What a configuration does not have is left unused.
_TINY: Options = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_TEXT: Options = {
    **_TINY,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_DECODER: Options = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_CACHED: Options = {**_DECODER, "use_cache": True}
_EXPERTS: Options = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_BOTH: Options = {  # encoder and decoder
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
_IMAGE: Options = {**_TINY, "image_size": 32, "patch_size": 8}
_CLIP_TEXT: Options = {**_TEXT, "max_position_embeddings": 16, "projection_dim": 32}
_SEQUENCES: Options = {**_TEXT, "decoder_start_token_id": 0}
_SAM: Options = {
    "vision_config": {**_IMAGE, "mlp_dim": 128, "window_size": 2, "global_attn_indexes": [1]},
    "prompt_encoder_config": {"image_size": 32, "patch_size": 8},
    "mask_decoder_config": {"mlp_dim": 64, "num_attention_heads": 4},
}


def _text() -> Batch:
    return {"input_ids": tokens()}


def _pair() -> Batch:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(8)}


def _image() -> Batch:
    return {"pixel_values": images(32)}


def _large_image() -> Batch:
    return {"pixel_values": images(64)}


def _text_and_image() -> Batch:
    return {"input_ids": tokens(), "pixel_values": images(32)}


def _points() -> Batch:
    return {"pixel_values": images(32, 1), "input_points": torch.rand(1, 1, 2, 2) * 32}


def _spectrum() -> Batch:
    return {"input_features": torch.randn(2, 80, 40), "decoder_input_ids": tokens(8)}


def _sound() -> Batch:
    return {"input_values": torch.randn(2, 6400)}


def _model(
    name: str, cls: str, batch: Callable[[], Batch] = _text, attention: str | None = None, **options: Any
) -> Architecture:
    """A model of transformers by its class, of a configuration of that class with some options."""

    def build() -> Built:
        import_torchvision()  # transformers imports it
        import transformers

        model = getattr(transformers, cls)
        config = model.config_class(**options)
        named = {} if attention is None else {"attn_implementation": attention}
        return model._from_config(config, **named), [batch(), batch()]

    return Architecture(f"hf {name}", build)


ARCHITECTURES = [
    _model("bert", "BertModel", **_TEXT),
    _model("bert, eager attention", "BertModel", **_TEXT, attention="eager"),
    _model("bert, masked LM", "BertForMaskedLM", **_TEXT),
    _model("distilbert", "DistilBertModel", **_TEXT, hidden_dim=128),
    _model("albert", "AlbertModel", **_TEXT, embedding_size=32),
    _model("opt", "OPTForCausalLM", **_TEXT, ffn_dim=128, word_embed_proj_dim=64),
    _model("bloom", "BloomForCausalLM", **_TEXT),
    _model("gpt2", "GPT2LMHeadModel", **_TEXT),
    _model("deberta_v2", "DebertaV2Model", **_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _model("rwkv", "RwkvForCausalLM", **_TEXT, attention_hidden_size=64),
    _model("t5", "T5ForConditionalGeneration", _pair, **_SEQUENCES, d_ff=128, num_decoder_layers=2),
    _model("bart", "BartModel", _pair, **_SEQUENCES, **_BOTH),
    _model("whisper", "WhisperModel", _spectrum, **_SEQUENCES, **_BOTH, max_source_positions=20),
    _model("vit", "ViTModel", _image, **_IMAGE),
    _model("dinov2", "Dinov2Model", _image, **_IMAGE),
    _model("clip", "CLIPModel", _text_and_image, text_config=_CLIP_TEXT, vision_config=_IMAGE, projection_dim=32),
    _model("siglip", "SiglipModel", _text_and_image, text_config=_CLIP_TEXT, vision_config=_IMAGE),
    _model("swin", "SwinModel", _image, image_size=32, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
    _model("sam", "SamModel", _points, **_SAM),
    _model("resnet", "ResNetModel", _large_image, embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1]),
    _model("llama", "LlamaForCausalLM", **_DECODER),
    _model("llama, tied", "LlamaForCausalLM", **_DECODER, tie_word_embeddings=True),
    _model("llama, eager attention", "LlamaForCausalLM", **_DECODER, attention="eager"),
    _model("llama, with its cache", "LlamaForCausalLM", **_CACHED),
    _model("mistral", "MistralForCausalLM", **_DECODER),
    _model("qwen2", "Qwen2ForCausalLM", **_DECODER),
    _model("qwen3", "Qwen3ForCausalLM", **_DECODER),
    _model("phi3", "Phi3ForCausalLM", **_DECODER),
    _model("gemma3", "Gemma3ForCausalLM", **_DECODER),
    _model("gpt_neox", "GPTNeoXForCausalLM", **_TEXT),
    _model("modernbert", "ModernBertModel", **_TEXT),
    _model("mixtral", "MixtralForCausalLM", **_DECODER, num_local_experts=4),
    _model("qwen3_moe", "Qwen3MoeForCausalLM", **_DECODER, **_EXPERTS, num_experts=4),
    _model("gpt_oss", "GptOssForCausalLM", **_DECODER, num_local_experts=4, num_experts_per_tok=2),
    _model(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        **_TEXT,
        **_EXPERTS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    _model("mamba", "MambaForCausalLM", **_TEXT, state_size=8, time_step_rank=4),
    _model("mamba2", "Mamba2ForCausalLM", **_TEXT, state_size=8, num_heads=8, head_dim=16, n_groups=2, chunk_size=8),
    _model(
        "detr",
        "DetrModel",
        _large_image,
        **_BOTH,
        num_queries=5,
        backbone_config={"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]},
    ),
    _model("wav2vec2", "Wav2Vec2Model", _sound, **_TINY, vocab_size=32, conv_dim=[32] * 7, num_conv_pos_embeddings=16),
    _model("segformer", "SegformerModel", _large_image, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1]),
]

_AST = {"num_mel_bins": 32, "max_length": 64, "frequency_stride": 16, "time_stride": 16}
_VIVIT = {"num_frames": 4, "tubelet_size": [2, 8, 8]}
MORE = [
    _model("ast", "ASTModel", lambda: {"input_values": torch.randn(2, 64, 32)}, **_TINY, **_AST),
    _model("vivit", "VivitModel", lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32)}, **_IMAGE, **_VIVIT),
    _model("owlvit", "OwlViTModel", _text_and_image, text_config=_CLIP_TEXT, vision_config=_IMAGE, projection_dim=32),
    _model("deit", "DeiTModel", _image, **_IMAGE),
    _model("beit", "BeitModel", _image, **_IMAGE),
    _model("videomae", "VideoMAEModel", lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32)}, **_IMAGE, num_frames=4),
    _model("convnext", "ConvNextModel", _large_image, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1]),
    _model(
        "pvt_v2",
        "PvtV2Model",
        _large_image,
        image_size=64,
        hidden_sizes=[16, 32, 64, 64],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
    ),
    _model("mpnet", "MPNetModel", **_TEXT),
    _model("roberta", "RobertaModel", **_TEXT),
    _model("electra", "ElectraModel", **_TEXT, embedding_size=32),
    _model("xlnet", "XLNetModel", vocab_size=96, d_model=64, n_layer=2, n_head=4, d_inner=128),
]
"""Further ones, tried by `new_data` alone."""
