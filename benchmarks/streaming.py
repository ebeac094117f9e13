"""CPU seconds, memory and error of `fq.improve_folder`, beside llm-compressor's GPTQ of the same folder (Linux).

Each job runs in a process of its own with one thread: from a folder of a made Llama in bfloat16 to a folder in
compressed-tensors, int4 in groups of 128, on the same rows. The seconds are those of the user after the imports. The
error is the share of the squares of the logits on rows that no job saw. It needs transformers, safetensors, Accelerate
and compressed-tensors; `--peer` is the Python that has llmcompressor, torch and transformers.

python -m benchmarks.streaming --peer venv/bin/python      # hidden 1024, MLP 4096, 2 blocks, 8 rows of 256 tokens
python -m benchmarks.streaming --hidden 2048 --blocks 4 --tail 26 --vocab 32000 --rows 4 --length 512  # 2B
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tests.support.vision import import_torchvision

_GROUP = 128


def made(folder: Path, given: argparse.Namespace) -> None:
    """Save a Llama of random weights, whose hidden states lie in few directions."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=given.vocab,
        hidden_size=given.hidden,
        intermediate_size=4 * given.hidden,
        num_hidden_layers=given.blocks + given.tail,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=given.hidden // 256,
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    table = model.model.embed_tokens.weight
    size = torch.arange(1, given.hidden + 1).float().rsqrt()
    mixing = torch.linalg.qr(torch.randn(given.hidden, given.hidden))[0]
    table.data = ((torch.randn(table.shape) * size) @ mixing).to(table.dtype)
    model.save_pretrained(folder, max_shard_size="1GB")


def rows(given: argparse.Namespace, seed: int, count: int) -> list[Tensor]:
    """Batches [1, tokens] of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(given.vocab, (1, given.length), generator=generator) for _ in range(count)]


def fakequant_job(folder: Path, out: Path, given: argparse.Namespace) -> Any:
    """What quantizes the first blocks of a folder by `improve_folder`."""
    import fakequant as fq

    names = [f"model.layers.{number}.*proj" for number in range(given.blocks)]
    config = fq.Config("W4", [fq.Rule(name, weight=f"int4 per_block(-1:{_GROUP})") for name in names])
    batches = [{"input_ids": row} for row in rows(given, 1, given.rows)]
    steps = given.steps if given.steps in ("fast", "best") else given.steps.split(",")
    return lambda: fq.improve_folder(folder, out, config, batches, steps, progress=False)


def peer_job(folder: Path, out: Path, given: argparse.Namespace) -> Any:
    """The same by GPTQ of llm-compressor."""
    import transformers
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    weights = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=_GROUP, actorder="static")
    recipe = GPTQModifier(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)}, ignore=["lm_head"]
    )
    held = [{"input_ids": row[0]} for row in rows(given, 1, given.rows)]

    class Tokenizer(transformers.PreTrainedTokenizerBase):
        pad_token = None  # it is asked for, and never used

    def run() -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        loader: Any = torch.utils.data.DataLoader(held, batch_size=1)  # type: ignore[arg-type]
        oneshot(model=model, dataset=loader, processor=Tokenizer(), recipe=recipe, num_calibration_samples=given.rows)
        model.save_pretrained(out, save_compressed=True)

    return run


def job(folder: Path, out: Path, given: argparse.Namespace) -> dict[str, float]:
    """The seconds of a job after its imports, and its peak beyond them."""
    import transformers

    from benchmarks.accuracy.memory import resident

    assert transformers.LlamaForCausalLM  # imported when it is first named

    torch.set_num_threads(1)
    call = (fakequant_job if given.job == "fakequant" else peer_job)(folder, out, given)
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    start, wall = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.perf_counter()
    call()
    return {
        "user": round(resource.getrusage(resource.RUSAGE_SELF).ru_utime - start, 1),
        "wall": round(time.perf_counter() - wall, 1),
        "beyond_MB": round((resident("VmHWM") - before) / 1e6),
    }


@torch.no_grad()
def error(folder: Path, out: Path, given: argparse.Namespace) -> float:
    """The squared error of the logits of a delivered folder as a share of their squares, on rows of another seed."""
    import transformers

    import fakequant as fq

    def opened() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    float_model, model = opened(), fq.read(out, opened())
    wrong = energy = 0.0
    for row in rows(given, 2, 4):
        wanted = float_model(row).logits.double()
        wrong += float((model(row).logits - wanted).square().sum())
        energy += float(wanted.square().sum())
    return wrong / energy


def main() -> None:
    """Print a line of JSON for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ("hidden", 1024), ("blocks", 2), ("tail", 0), ("vocab", 4096), ("rows", 8), ("length", 256)
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", default="fast")
    parser.add_argument("--peer", help="the Python that has llmcompressor")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if find_spec("torchvision"):
        import_torchvision()  # transformers imports it
    if given.job:
        print(json.dumps(job(given.folder / "source", given.folder / given.job, given)))
        return
    with TemporaryDirectory() as scratch:
        made(Path(scratch) / "source", given)
        arguments = [f"--{name}={getattr(given, name)}" for name, _ in sizes]
        jobs = [("fakequant", sys.executable), *([("peer", given.peer)] if given.peer else [])]
        for number in range(given.times):
            for name, python in jobs:
                own = ["-m", "benchmarks.streaming", *arguments, f"--steps={given.steps}", f"--job={name}"]
                out = Path(scratch) / name
                if out.exists():
                    subprocess.run(["rm", "-r", out], check=True)
                found = subprocess.run(
                    [python, *own, f"--folder={scratch}"],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
                row = {"job": name, **json.loads(found.stdout.splitlines()[-1])}
                if not number and not given.tail:
                    row["error"] = round(error(Path(scratch) / "source", out, given), 6)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
