"""A small language model in 4 bits, in files that transformers and llama.cpp load: the same text from all of them.

python examples/language_model.py language-model    # the folder that gets the files; about a minute

A Llama whose tokens are bytes is trained on a module of Python's standard library. Once its codes are chosen by
`fq.ptq.improve` and delivered as compressed-tensors; once it is trained on with the lattice of a K-quant, and
delivered as GGUF. It needs `pip install 'fakequant[delivery]'`. llama.cpp runs, too, where docs/delivery.md says.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fakequant as fq
from fakequant.delivery.gguf import llama_cpp

TEXT = Path(argparse.__file__).read_bytes()  # 100 KB
PROMPT = b"    def add_argument(self"
WINDOW, BATCH, RATE = 128, 8, 2e-3


def batches(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Windows of the text; the model computes its own loss from `labels`."""
    data = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - WINDOW, (count, BATCH, 1), generator=generator)
    return [{"input_ids": ids, "labels": ids} for ids in data[starts + torch.arange(WINDOW)]]


def trained(steps: int) -> Any:
    """A Llama of two layers; its width of 256 is a block of a K-quant."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    net = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=256, pad_token_id=0))
    optimizer = torch.optim.AdamW(net.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    for batch in batches(steps, seed=0):
        optimizer.zero_grad()
        net(**batch).loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


@torch.no_grad()
def loss(model: Any) -> float:
    """Nats per byte, on windows of the same text."""
    return sum(float(model(**batch).loss) for batch in batches(2, seed=1)) / 2


def text(model: Any, count: int = 60) -> str:
    """The prompt and the likeliest bytes after it."""
    ids = torch.tensor([list(PROMPT)])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return bytes(found[0].tolist()).decode(errors="replace")


def text_by_llama_cpp(file: Path, count: int = 60) -> str:
    """The same by llama.cpp."""
    net, ids = llama_cpp.LlamaCpp(file), torch.tensor([list(PROMPT)])
    for _ in range(count):
        ids = torch.cat([ids, net(ids)["logits"][:, -1:].argmax(-1)], 1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def compare(name: str, model: Any, path: Path, loaded: Any) -> None:
    """Print and assert that a loaded file computes what its model does."""
    assert fq.verify_delivery(path, model).passed
    simulated, said = loss(model), text(model)
    apart = loss(loaded.eval()) - simulated
    print(f"{name}: {simulated:.4f} nats per byte; the file minus the simulation: {apart}\n{said}\n")
    assert (apart, text(loaded)) == (0, said)


def main(out: Path, steps: int = 150) -> None:
    """Train, quantize in two ways, deliver, load."""
    net = trained(steps)
    print(f"float: {loss(net):.4f} nats per byte")
    model = fq.prepare(copy.deepcopy(net), fq.presets.INT4_GROUP32)
    fq.ptq.improve(model, [{"input_ids": batch["input_ids"]} for batch in batches(8, seed=2)], "fast")
    folder = fq.deliver(model, out / "compressed-tensors", "compressed-tensors")
    compare("improve, INT4_GROUP32", model, folder, AutoModelForCausalLM.from_pretrained(folder))
    model = fq.prepare(copy.deepcopy(net), fq.presets.GGUF_Q4_K)
    schedule = fq.qat.Schedule(RATE, original_epochs=1, fraction=1.0, start=0.1)
    fq.qat.finetune(model, batches(steps // 5, seed=3), None, schedule, fq.qat.Options(optimizer=torch.optim.AdamW))
    file = fq.deliver(model, out / "q4_k.gguf", "gguf")
    compare("QAT, GGUF_Q4_K", model, file, AutoModelForCausalLM.from_pretrained(out, gguf_file=str(file.resolve())))
    if llama_cpp.is_there():
        assert text_by_llama_cpp(file) == text(fq.delivery.llama_cpp_inputs(model))
        print(f"llama.cpp: the same text as the model with the inputs of llama.cpp\n{text_by_llama_cpp(file)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "language-model"))
