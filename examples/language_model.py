"""A small language model in 4 bits, in files that transformers and llama.cpp load: the same text from all of them.

python examples/language_model.py language-model    # the folder that gets the files; about a minute

A Llama whose tokens are bytes is trained on a module of Python's standard library. Once its codes are chosen by
`fq.ptq.improve` and delivered as compressed-tensors; once it is trained on with the lattice of a K-quant, and
delivered as GGUF. It needs `pip install 'fakequant[delivery]'`. llama.cpp runs, too, where LLAMA_CPP_LIB_PATH is the
folder of its shared libraries and LLAMA_CPP_BINDINGS the source distribution of llama-cpp-python.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fakequant as fq

TEXT = Path(argparse.__file__).read_bytes()  # 100 KB
PROMPT = b"    def add_argument(self"
WINDOW, BATCH, RATE = 128, 8, 2e-3
LLAMA_CPP = [os.environ.get(name) for name in ("LLAMA_CPP_LIB_PATH", "LLAMA_CPP_BINDINGS")]


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
    """The same by llama.cpp, one token after the other."""
    package = ModuleType("llama_cpp")  # its own __init__ imports more than the bindings need
    package.__path__ = [f"{LLAMA_CPP[1]}/llama_cpp"]
    sys.modules.setdefault("llama_cpp", package)
    import llama_cpp.llama_cpp as lib  # pyright: ignore[reportMissingImports]

    lib.quiet = lib.llama_log_callback(lambda *said: None)  # kept, because llama.cpp goes on calling it
    lib.llama_log_set(lib.quiet, None)
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    options = lib.llama_context_default_params()
    options.n_ctx, options.type_k, options.type_v, options.flash_attn_type = 256, 0, 0, 0  # a cache of float32
    context = lib.llama_init_from_model(model, options)
    new, ids = list(PROMPT), list(PROMPT)
    for _ in range(count):
        tokens = (lib.llama_token * len(new))(*new)
        assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(new))) == 0
        new = [int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (256,)).argmax())]
        ids += new
    return bytes(ids).decode(errors="replace")


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
    compare("QAT, GGUF_Q4_K", model, file, AutoModelForCausalLM.from_pretrained(out, gguf_file=file.name))
    if all(LLAMA_CPP):
        with fq.delivery.llama_cpp_inputs(model):
            assert text_by_llama_cpp(file) == text(model)
        print(f"llama.cpp: the same text as the model with the inputs of llama.cpp\n{text_by_llama_cpp(file)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "language-model"))
