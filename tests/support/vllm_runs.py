"""What vLLM computes on a CPU; the interpreter of its own environment runs this file, see `logits` and `codes`."""

import os
import sys

import numpy as np

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def logits(folder: str, tokens: str, out: str, vocabulary: str, dtype: str = "float32", update: str = "") -> None:
    """Write the log-probabilities of all tokens [prompts, places, vocabulary] for prompts [prompts, places + 1].

    Args:
        dtype: in which the server computes.
        update: a file of tensors that the running server takes in place of those of the folder.
    """
    from vllm import LLM, SamplingParams

    ids, size = np.load(tokens), int(vocabulary)
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=2 * ids.shape[1],
        max_logprobs=size,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
    )
    if update:
        from safetensors.torch import load_file

        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(load_file(update).items())})
    how = SamplingParams(max_tokens=1, prompt_logprobs=size, detokenize=False, temperature=0)
    found = np.full((len(ids), ids.shape[1] - 1, size), np.nan)
    for row, answer in enumerate(engine.generate([{"prompt_token_ids": own.tolist()} for own in ids], how)):
        for place, position in enumerate(answer.prompt_logprobs[1:]):
            for token, value in position.items():
                found[row, place, token] = value.logprob
    np.save(out, found)


def codes(values: str, kind: str, out: str, preset: str) -> None:
    """Write the codes and scales that vLLM gives rows of values in float32 or bfloat16 as inputs of a preset."""
    import torch
    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    x = torch.from_numpy(np.load(values)).to(getattr(torch, kind))
    if preset == "W8A8_DYNAMIC":
        found, scale, _ = _custom_ops.onednn_scaled_int8_quant(x.contiguous(), None, None, True)
    else:
        with set_current_vllm_config(VllmConfig()):
            found, scale = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)(x)
    np.savez(out, codes=found.view(torch.uint8).numpy(), scale=scale.float().numpy())


if __name__ == "__main__":
    {"logits": logits, "codes": codes}[sys.argv[1]](*sys.argv[2:])
