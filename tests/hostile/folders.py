"""Read folders of many formats that were changed at random, each within limits of memory and time; run by hand.

    python tests/hostile/folders.py [--count 3000] [--seed 0] [--kind int4 gguf ...]

A process of its own reads each changed folder: an error of the package or a model are right; any other error, more than
10 GB or 25 s, and a change of a file that is there, are wrong. Prints one line, and what went wrong; exits 1 if
anything did.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import fakequant as fq
from fakequant.errors import FakeQuantError
from tests.hostile.mutations import change, cut
from tests.support.language_models import llama, mixtral
from tests.support.streamed import batches, decoder, without_weights
from tests.support.vision import import_torchvision

_MEMORY, _SECONDS = 10 * 2**30, 25
Make = Callable[[Path], object]
Read = Callable[[Path], object]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))


def prepared(preset: fq.Config | str, model: nn.Module | None = None, **options: Any) -> nn.Module:
    is_spec = isinstance(preset, str) and " " in preset
    config = fq.Config("own", [fq.Rule("*", weight=preset)]) if is_spec else preset
    model = fq.prepare(net() if model is None else model, config, **options)
    x: Any = torch.randn(4, 64) if isinstance(model, nn.Sequential) else {"input_ids": torch.arange(8)[None]}
    fq.calibrate(model, [x], progress=False)
    return model


def plain(preset: str, format: str = "compressed-tensors", **options: Any) -> tuple[Make, Read]:
    """A delivery of two layers, read with a model."""
    return lambda path: fq.deliver(prepared(preset), path, format, **options), lambda path: fq.read(path, net())


def language(preset: str, make: Callable[[], nn.Module] = llama, **options: Any) -> tuple[Make, Read]:
    """A delivery of a language model, read without one."""
    return lambda path: fq.deliver(prepared(preset, make(), **options), path, "compressed-tensors"), fq.read


def gguf(kind: str, *, with_model: bool) -> tuple[Make, Read]:
    def write(path: Path) -> None:
        fq.deliver(prepared(f"GGUF_{kind}", llama()), path, "gguf")

    def read(path: Path) -> object:
        model = (llama(),) if with_model else ()
        return fq.read(path / "model.gguf", *model)

    return write, read


def checkpoint(preset: str, *, packed: bool) -> tuple[Make, Read]:
    return lambda path: fq.save(prepared(preset), path, packed=packed), lambda path: fq.load(net(), path)


class Stop(BaseException):
    pass


def streamed(path: Path) -> object:
    """What goes on from a folder of `improve_folder`, and then reads what it wrote."""
    empty, load = without_weights(decoder())
    out = path.with_name("out of a run")
    fq.improve_folder(empty, out, "int4_group32", batches(2), ("ranges",), load=load, work=path, progress=False)
    return fq.read(out, decoder())


def begin_streamed(path: Path) -> None:
    empty, load = without_weights(decoder())

    def stops(name: str) -> Any:
        if name == "blocks.2":
            raise Stop
        return load(name)

    try:
        out = path.with_name("out of a run")
        fq.improve_folder(empty, out, "int4_group32", batches(2), ("ranges",), load=stops, work=path, progress=False)
    except Stop:
        pass


def improved(path: Path) -> object:
    model = fq.prepare(net(), "int4_group32")
    return fq.ptq.improve(model, [torch.ones(2, 64)], ("ranges",), checkpoint=path, progress=False)


_FP8 = "float8_e4m3fn per_channel(0)"
_MX = "per_block(-1:32) scale=float8_e8m0fnu:floor"
_MLX = "uint4 per_block(-1:32) scale=bfloat16 offset=bfloat16"
_SKIP = ["lm_head", "*embed_tokens"]
KINDS: dict[str, tuple[Make, Read]] = {
    **{one: plain(one) for one in ("int4_group32", "int8", "int8_weight_only", "w8a8_dynamic", "fp8")},
    **{one: plain(one) for one in ("nvfp4_weight_only", "int2 per_block(-1:32)", "uint3 per_channel(0)", _FP8)},
    **{one: plain(one) for one in (f"float4_e2m1fn {_MX}", f"float6_e2m3fn {_MX}", f"float8_e4m3fn {_MX}")},
    **{f"torchao {one}": plain(one, "torchao") for one in ("int4_group32", "int8_weight_only", _FP8)},
    **{f"mlx {one}": plain(one, "mlx") for one in (_MLX, "mlx_nvfp4", "int4_group32")},
    "torchao nvfp4": plain("nvfp4_weight_only", "torchao"),
    "shards": plain("int4_group32", max_shard_size=1500),
    "torchao shards": plain("int8_weight_only", "torchao", max_shard_size=1500),
    **{f"llama {one}": language(one, skip=_SKIP) for one in ("int4_group32", "w8a8_dynamic", "nvfp4_weight_only")},
    **{f"mixtral {one}": language(one, mixtral, skip=_SKIP) for one in ("int4_group32", "int8_weight_only")},
    **{f"gguf {one}": gguf(one, with_model=True) for one in ("Q4_0", "Q4_K", "Q6_K", "Q8_0")},
    **{f"gguf {one} alone": gguf(one, with_model=False) for one in ("Q4_0", "Q4_K")},
    **{f"saved {one}": checkpoint(one, packed=False) for one in ("int8", "int4_group32")},
    **{f"packed {one}": checkpoint(one, packed=True) for one in ("int4_group32", "nvfp4_weight_only", "int8")},
    "a run of improve_folder": (begin_streamed, streamed),
    "layers of improve": (improved, improved),
}
"""Folders by name: what makes one, and what reads it."""


def changed(folder: Path, draw: random.Random) -> None:
    """Change a file of a folder: values of its JSON or of its header, or bytes."""
    path = draw.choice([one for one in sorted(folder.rglob("*")) if one.is_file() and one.name != "thesis.txt"])
    data = path.read_bytes()
    try:
        if path.suffix == ".json" and draw.random() < 0.8:
            values = json.loads(data)
            for _ in range(draw.randint(1, 3)):
                change(values, draw)
            data = json.dumps(values).encode("utf-8", "surrogatepass")
        elif path.suffix == ".safetensors" and draw.random() < 0.6:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            for _ in range(draw.randint(1, 2)):
                change(header, draw)
            said = json.dumps(header).encode("utf-8", "surrogatepass")
            data = len(said).to_bytes(8, "little") + said + data[8 + length :]
        elif data:
            place = draw.choice([len(data), min(len(data), 4096)])
            data = cut(data[:place], draw) + data[place:]
    except ValueError:
        pass
    path.write_bytes(data)


def outcome(read: Read, folder: Path) -> str:
    """What a process of its own finds."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        said = "a model"
        try:
            os.close(here)
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_SECONDS)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(folder)
        except FakeQuantError:
            said = "refused"
        except BaseException:
            said = f"raw: {traceback.format_exc(limit=-3)}"
        finally:
            os.write(there, said[:4000].encode("utf-8", "backslashreplace"))
            os._exit(0)
    os.close(there)
    with open(here, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    return said or (f"hangs for {_SECONDS} s" if os.WTERMSIG(status) == signal.SIGALRM else f"died with {status}")


def run(kinds: list[str], count: int, seed: int) -> list[str]:
    """Read a number of changed folders; returns what went wrong."""
    wrong, counts, draw = list[str](), Counter[str](), random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        for place, kind in enumerate(kinds):
            make, read = KINDS[kind]
            whole, folder = Path(name) / f"whole {place}", Path(name) / f"changed {place}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(whole)
            for number in range(count // len(kinds) + (place < count % len(kinds))):
                shutil.rmtree(folder, ignore_errors=True)
                shutil.rmtree(folder.with_name("out of a run"), ignore_errors=True)
                shutil.copytree(whole, folder)
                changed(folder, draw)
                out = folder.with_name("out of a run")
                out.mkdir()
                (out / "thesis.txt").write_text("precious")
                found = outcome(read, folder)
                counts[found.partition(":")[0]] += 1
                if found not in ("a model", "refused"):
                    print(kind, number, found, flush=True)
                    wrong.append(f"{kind} {number} (seed {seed}): {found}")
                if (out / "thesis.txt").read_text() != "precious":
                    wrong.append(f"{kind} {number} (seed {seed}): a file of the user is another")
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{count} changes of folders of {len(kinds)} kinds: {dict(counts)}, {len(wrong)} wrong")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    import_torchvision()
    wrong = run(options.kind, options.count, options.seed)
    print(*wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
