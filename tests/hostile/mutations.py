"""Load files that were changed at random: each is refused by an error of the package, or right; run by hand.

    python tests/hostile/mutations.py [--count 5000] [--seed 0] [--kind manifest header ...]

Nothing may be executed, written, or allocated beyond ten times the size of the files, and a model that refuses a
checkpoint stays as it was. Prints one line, and what went wrong; exits 1 if anything did.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import sys
import tempfile
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import fakequant as fq
from fakequant.errors import FakeQuantError
from tests.hostile.record_mutations import record_mutations
from tests.support.checkpoints import assert_as_before, put_tensors, state_of

Case = tuple[int, Callable[[], object]]
"""The size of the files in bytes, and what loads them."""

_ALLOWED = 1 << 20
"""Bytes that a load may take however small its files are: tracebacks, messages, caches."""
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 16, 2**31, 2**63, -(2**63), 10**40, 1.5, -0.0, 1e300, float("nan"), float("inf")),
    *(
        "",
        "off",
        "observe",
        "quantize",
        "auto",
        "integer",
        "warp",
        "lsq",
        "lsq_plus",
        "pact",
        "tqt",
        "Linear",
        "Conv2d",
    ),
    *("int8", "uint8 per_tensor", "int4 per_channel(0)", "int4 per_channel(7)", "int8 per_block(-1:32)", "int9x"),
    *("int[-1000000000000,1000000000000]", "nf4 per_block(-1:64)", "int8 per_token dynamic", "int8 per_block(-1:0)"),
    *(
        "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn",
        "int8 per_channel(99999999999999999999)",
        "int8 per_block(",
    ),
    *(
        "../../etc/passwd",
        "/dev/zero",
        "a" * 10_000,
        "\x1b[2J",
        "\ud800",
        "\0",
        "0.weight",
        "0._weight_quantizer.scale",
    ),
    *("F32", "F64", "F16", "BF16", "I64", "I32", "U8", "BOOL", "C64", "F4", "F8_E8M0", "F8_E4M3"),
    *([], {}, [[]], [1, 1], [-1], [0], [10**6, 10**6], [1] * 1000, ["x"], [0, 4], [0, 2**62], {"a": 1}, {"": {}}),
)


def network() -> nn.Module:
    """The model that checkpoints are loaded into."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 4))
    model[4].weight = nn.Parameter(torch.randn(4, 4))
    return model


def checkpoint(folder: Path) -> Path:
    """A checkpoint with fixed, dynamic and learned ranges, zero points and versions of modules."""
    first = fq.Rule("0", input="uint8", weight="int8 per_channel(0)")
    config = fq.Config("some", (first, fq.Rule("3", weight="int4"), fq.Rule("4", "int8_per_token")))
    model = fq.prepare(network(), config)
    fq.calibrate(model, [torch.randn(8, 4)])
    model[4]._weight_quantizer.learn("lsq")
    return fq.save(model, folder)


def manifests(folder: Path, seed: int) -> Iterator[Case]:
    """Checkpoints with another manifest."""
    draw = random.Random(seed)
    path = checkpoint(folder) / "fakequant.json"
    text = path.read_text()
    while True:
        values = json.loads(text)
        for _ in range(draw.randint(1, 3)):
            change(values, draw)
        path.write_bytes(cut(json.dumps(values).encode(), draw) if draw.random() < 0.2 else json.dumps(values).encode())
        yield size_of(folder), lambda: load_and_run(folder)


def headers(folder: Path, seed: int) -> Iterator[Case]:
    """Checkpoints whose file of tensors has another header, or other bytes, with a manifest that fits it."""
    draw = random.Random(seed)
    checkpoint(folder)
    manifest = (folder / "fakequant.json").read_text()
    data = (folder / json.loads(manifest)["tensors"]["file"]).read_bytes()
    length = int.from_bytes(data[:8], "little")
    while True:
        header = json.loads(data[8 : 8 + length])
        for _ in range(draw.randint(0, 2)):
            change(header, draw)
        said = json.dumps(header).encode()
        stated = draw.choice([len(said)] * 8 + [0, 2**62, len(said) + 1])
        whole = stated.to_bytes(8, "little") + said + data[8 + length :]
        for file in folder.iterdir():
            file.unlink()
        (folder / "fakequant.json").write_text(manifest)
        put_tensors(folder, cut(whole, draw) if draw.random() < 0.3 else whole)
        yield size_of(folder), lambda: load_and_run(folder)


def records(folder: Path, seed: int) -> Iterator[Case]:
    """ONNX files with other records of their quantizers."""
    for data in record_mutations(seed):
        (folder / "model.onnx").write_bytes(data)
        yield len(data), lambda: fq.verify_onnx(folder / "model.onnx")


KINDS: dict[str, Callable[[Path, int], Iterator[Case]]]
KINDS = {"manifest": manifests, "header": headers, "record": records}


def load_and_run(folder: Path) -> None:
    """Load a checkpoint, and run the model if it is loaded."""
    model = network()
    before = state_of(model)
    try:
        fq.load(model, folder)
    except BaseException:
        assert_as_before(model, before)
        raise
    assert model.eval()(torch.ones(2, 4)).shape == (2, 4)


def change(values: Any, draw: random.Random) -> None:
    """Replace, take away, double or exchange a value somewhere in what JSON can say, in place."""
    places = list(_places(values))
    if not places:
        return
    holder, key = draw.choice(places)
    match draw.randrange(4):
        case 0:
            holder[key] = copy.deepcopy(draw.choice(_VALUES))
        case 1:
            del holder[key]
        case 2 if isinstance(holder, dict):
            holder[draw.choice(["x", "", "mode", "0", f"{key}x"])] = copy.deepcopy(holder[key])
        case _:
            other, at = draw.choice(places)
            holder[key], value = copy.deepcopy(other[at]), holder[key]
            if not isinstance(value, (dict, list)):
                other[at] = value


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    for key in values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ():
        yield values, key
        yield from _places(values[key])


def cut(data: bytes, draw: random.Random) -> bytes:
    """Cut, nested, or with some bytes changed."""
    place = draw.randrange(len(data))
    match draw.randrange(4):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + b"[" * draw.choice([10, 2_000, 200_000]) + data[place:]
        case 2:
            return data[:place] + bytes(draw.randrange(256) for _ in range(3)) + data[place + 3 :]
        case _:
            return data[:place] + data[place : place + 40] + data[place:]


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


class Watch:
    """What a process does to files and others while it is on."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and (_is_writing(arguments[1]) if event == "open" else event.startswith(_DOES)):
            self.seen.append(f"{event} {arguments!r:.100}")


_DOES = (
    *(
        "os.remove",
        "os.rename",
        "os.link",
        "os.symlink",
        "os.mkdir",
        "os.rmdir",
        "os.chmod",
        "os.truncate",
        "os.system",
    ),
    *("os.exec", "os.posix_spawn", "os.fork", "subprocess.", "socket.connect", "ctypes.dlopen"),
    "pickle.find_class",
)
"""Events of the interpreter, see `sys.audit`."""


def _is_writing(mode: object) -> bool:
    return isinstance(mode, str) and bool(set(mode) & set("wax+"))


def run(kinds: list[str], count: int, seed: int) -> list[str]:
    """Load a number of files; returns what went wrong."""
    watch, wrong, refused = Watch(), list[str](), 0
    number = 0
    for place, kind in enumerate(kinds):
        share = count // len(kinds) + (place < count % len(kinds))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for number, (size, load) in zip(range(share + 1), KINDS[kind](folder, seed), strict=False):
                fault, was_refused = _attempt(size, load, watch, measured=number > 0)  # the first one imports
                refused += was_refused
                wrong += [f"{kind} {number} (seed {seed}): {fault}"] if fault else []
    print(f"{count} files of the kinds {', '.join(kinds)}: {refused} refused, {len(wrong)} wrong")
    return wrong


def _attempt(size: int, load: Callable[[], object], watch: Watch, *, measured: bool) -> tuple[str, bool]:
    refused = False
    tracemalloc.start()
    watch.on = measured
    try:
        load()
    except FakeQuantError:
        refused = True
    except Exception:
        return traceback.format_exc(limit=-3), False
    finally:
        watch.on = False
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if measured and peak > 10 * size + _ALLOWED:
        return f"{peak:,} bytes were allocated for {size:,} of files", refused
    if watch.seen:
        seen, watch.seen = watch.seen, []
        return f"did {', '.join(seen)}", refused
    return "", refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Torch's own memory is not traced: what asks for much more than there is now is an error.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
    wrong = run(options.kind, options.count, options.seed)
    print(*wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
