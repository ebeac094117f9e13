"""Measure a training step of LoRA on a base that is stored as codes over the same on a float32 base (Linux).

python -m benchmarks.qlora                                  # a Llama of 1.1 billion random weights; 6 GB of memory
python -m benchmarks.qlora --blocks 4 --presets nf4_weight_only gguf_q4_k --merged
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fakequant as fq
from benchmarks.accuracy.memory import resident
from tests.support.vision import import_torchvision

import_torchvision()

import peft  # noqa: E402
import transformers  # noqa: E402

from fakequant.integrations.peft import train_merged  # noqa: E402

FLOAT = "float32"
_TOKENS = 128


def base(blocks: int, preset: str) -> nn.Module:
    """A Llama of random weights, block by block, so that at most one block of a stored base is in float."""
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=blocks,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32_000,
    )
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    if preset != FLOAT:
        model = fq.prepare(model, preset, skip=[])
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    parts: Iterable[nn.Module] = (*model.model.layers, model.model.norm, model.model.embed_tokens, model.lm_head)
    for part in parts:
        part.to_empty(device="cpu")
        for parameter in part.parameters():
            parameter.data.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
        if preset != FLOAT and any(parameter.dim() > 1 for parameter in part.parameters()):
            fq.store_codes(part)
    return model


def step(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The CPU seconds and the loss of one step."""
    tokens = torch.randint(0, 32_000, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    started = time.process_time()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"cpu": time.process_time() - started, "loss": loss.item()}


def measure(given: argparse.Namespace, preset: str) -> dict[str, Any]:
    """The memory above the imports: of the model, the most while it was made, and in two steps; CPU seconds of one."""
    torch.manual_seed(0)
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    model: Any = base(given.blocks, preset)
    every = sum(parameter.numel() for parameter in model.parameters())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=targets)).train()
    if given.merged and preset != FLOAT:
        model = train_merged(model)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    found = {"parameters": every, "made_MB": resident() - before, "making_MB": resident("VmHWM") - before}
    Path("/proc/self/clear_refs").write_text("5")
    steps = [step(model, optimizer) for _ in range(2)]
    found["peak_MB"] = resident("VmHWM") - before
    found = {name: round(value / 1e6) if name.endswith("_MB") else value for name, value in found.items()}
    return found | {"cpu": round(steps[1]["cpu"], 2), "loss": round(steps[1]["loss"], 4)}


def main() -> None:
    """Print a line of JSON for each base, each in a process of its own, with the ratios to the float32 one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["int4_group64"])
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--merged", action="store_true", help="train W + BA as it will be merged")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.one:
        print(json.dumps(measure(given, given.one)))
        return
    rows: dict[str, dict[str, Any]] = {}
    for preset in (FLOAT, *given.presets):
        command = [sys.executable, "-m", "benchmarks.qlora", *sys.argv[1:], "--one", preset]
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        rows[preset] = json.loads(output.splitlines()[-1])
        ratios = {f"{key}_over_float": round(rows[preset][key] / rows[FLOAT][key], 3) for key in ("peak_MB", "cpu")}
        print(json.dumps({"base": preset} | rows[preset] | ratios), flush=True)


if __name__ == "__main__":
    main()
