"""What GGUF's types cost, beside llama.cpp's own quantizer: `python -m benchmarks.gguf [TYPE ...]`.

Prints two tables, of ratios below 1 where this package is nearer. The first is of the squared error of weights, by the
largest value of each block and by searched scales: of normal weights, and of a language model that
`examples/language_model.py` trains. The second is of the squared error of this model's logits on another text:
`improve` over llama.cpp's quantizer with its importance matrix. It needs llama.cpp's libggml-base in the folder that
LLAMA_CPP_LIB_PATH names, and the package gguf. About ten minutes on one core; each type in the list alone is less.
"""

from __future__ import annotations

import copy
import ctypes
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.calibration.lattice import search_params
from fakequant.ops import library
from tests.support.vision import import_torchvision

import_torchvision()

from examples import language_model  # noqa: E402

TYPES = ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
IMPROVED = ("Q4_K", "Q3_K", "Q2_K")
OTHER_TEXT = Path(fq.__file__).with_name("errors.py")


class LlamaCpp:
    """The quantizer of llama.cpp: weights [rows, columns] to the values of their codes."""

    def __init__(self, folder: str) -> None:
        import gguf

        self._gguf, self._lib = gguf, ctypes.CDLL(str(Path(folder) / "libggml-base.so"))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
        self._lib.ggml_quantize_chunk.restype = ctypes.c_size_t

    def __call__(self, weight: Tensor, name: str, importance: Tensor | None = None) -> Tensor:
        kind = self._gguf.GGMLQuantizationType[name]
        values = np.ascontiguousarray(weight.detach().numpy(), dtype=np.float32)
        given = None if importance is None else np.ascontiguousarray(importance.numpy(), dtype=np.float32)
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        rows, columns = values.shape
        out = np.zeros((rows, columns // block * size), np.uint8)
        self._lib.ggml_quantize_init(int(kind))
        address = None if given is None else given.ctypes.data
        written = self._lib.ggml_quantize_chunk(
            int(kind), values.ctypes.data, out.ctypes.data, 0, rows, columns, address
        )
        assert written == out.size, (written, out.size)
        return torch.from_numpy(self._gguf.quants.dequantize(out, kind))


def weight_rows(name: str, weights: Iterable[Tensor], llama: LlamaCpp) -> tuple[float, float, float]:
    """Squared errors over llama.cpp's: by the largest values, searched; and the seconds of the search per million."""
    spec = preset(name).rules[0].weight.spec
    errors, seconds, count = np.zeros(3), 0.0, 0
    for weight in weights:
        start = time.perf_counter()
        found = search_params(weight, spec)
        seconds += time.perf_counter() - start
        count += weight.numel()
        ours = fq.fake_quantize(weight, spec), library.fake_quantize(weight, found, spec), llama(weight, name)
        errors += [float((one - weight).double().square().sum()) for one in ours]
    return errors[0] / errors[2], errors[1] / errors[2], seconds / count * 1e6


def preset(name: str) -> Any:
    return fq.presets.presets()[f"GGUF_{name}"]


def linears(net: nn.Module) -> dict[str, nn.Linear]:
    return {path: one for path, one in net.named_modules() if isinstance(one, nn.Linear) and path != "lm_head"}


@torch.no_grad()
def by_llama_cpp(net: nn.Module, name: str, batches: list[Any], llama: LlamaCpp) -> nn.Module:
    """A copy with the values of llama.cpp, whose importance of a column is the mean square of its inputs."""
    squares: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, path=path: squares.update(
                {path: squares.get(path, torch.zeros(())) + given[0].flatten(0, -2).square().mean(0)}
            )
        )
        for path, layer in linears(net).items()
    ]
    for batch in batches:
        net(**batch)
    for hook in hooks:
        hook.remove()
    made = copy.deepcopy(net)
    for path, layer in linears(made).items():
        layer.weight.copy_(llama(layer.weight, name, squares[path] / len(batches)))
    return made


@torch.no_grad()
def distance(model: nn.Module, net: nn.Module, batches: list[Any]) -> float:
    return sum(float((model(**one).logits - net(**one).logits).double().square().sum()) for one in batches)


def main(types: list[str]) -> None:
    """Print both tables."""
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    if not folder:
        raise SystemExit("LLAMA_CPP_LIB_PATH must name the folder of llama.cpp's libggml-base.so")
    torch.set_num_threads(1)
    llama, net = LlamaCpp(folder), language_model.trained(150)
    torch.manual_seed(0)
    normal = [torch.randn(256, 4096) * 0.02]
    trained = [layer.weight.detach() for layer in linears(net).values()]
    print("squared error of weights over llama.cpp's: largest values, searched; seconds per million weights")
    for name in types or TYPES:
        rows = [weight_rows(name, weights, llama) for weights in (normal, trained)]
        shown = (f"{plain:.3f} {searched:.3f}" for plain, searched, _ in rows)
        print(f"{name:7} normal {'   trained '.join(shown)}   {rows[0][2]:.1f} s", flush=True)
    ids = [{"input_ids": batch["input_ids"]} for batch in language_model.batches(16, seed=2)]
    language_model.TEXT = OTHER_TEXT.read_bytes()
    new = [{"input_ids": batch["input_ids"]} for batch in language_model.batches(8, seed=5)]
    print("squared error of logits on another text over llama.cpp's with an importance matrix: largest values, improve")
    for name in [one for one in IMPROVED if not types or one in types]:
        skip = ["lm_head", "model.embed_tokens"]
        model = fq.prepare(copy.deepcopy(net), preset(name), skip=skip)
        theirs, plain = distance(by_llama_cpp(net, name, ids, llama), net, new), distance(model, net, new)
        start = time.perf_counter()
        fq.ptq.improve(model, ids, "best", progress=False)
        ours, seconds = distance(model, net, new), time.perf_counter() - start
        print(f"{name:7} {plain / theirs:.3f} {ours / theirs:.3f}   {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
