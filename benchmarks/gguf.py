"""What GGUF's types cost, beside llama.cpp's quantizer and AutoRound: `python -m benchmarks.gguf [TYPE ...]`.

Prints two tables, of ratios below 1 where this package is nearer than llama.cpp. The first is of the squared error of
weights, by the largest value of each block and by searched scales: of normal weights, and of a language model that
`examples/language_model.py` trains. The second is of this model: its perplexity in other parts of its text, and the
squared error of its logits on another text. llama.cpp has its importance matrix, and all have the same types. It needs
llama.cpp's libggml-base in the folder that LLAMA_CPP_LIB_PATH names, and the package gguf. AutoRound has rows where it
is installed, see `benchmarks/accuracy/language_peers.py`. Eight minutes on one core, and 25 with AutoRound.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks.accuracy.language_peers import loader
from fakequant.calibration.lattice import search_params
from fakequant.delivery.gguf.blocks import kind_of
from fakequant.nn.quantizer import Mode
from fakequant.ops import library
from tests.support.vision import import_torchvision

import_torchvision()

from examples import language_model  # noqa: E402

TYPES = ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
OF_MODELS = ("Q4_K", "Q3_K", "Q2_K")
MIXED = {"Q4_K": {"*.v_proj": "Q5_K"}}
"""Layers that have another type in the mixture of a type, Q4_K_S."""
STEPS = (0, 200)
"""Iterations of AutoRound for each block: 0 is its advice for GGUF, 200 its default."""
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


def layers(model: nn.Module) -> dict[str, Any]:
    """The linear layers of the blocks."""
    return {path: one for path, one in model.named_modules() if isinstance(one, nn.Linear) and path != "lm_head"}


def kind(layer: Any) -> str:
    """The type of a quantized layer."""
    return kind_of(layer.weight_quantizer.spec, layer.weight.shape)


def with_weights(model: nn.Module, weight: Callable[[str, Any], Tensor]) -> nn.Module:
    """A copy of a prepared model in float, with other weights."""
    made = copy.deepcopy(model)
    for path, layer in layers(made).items():
        layer.weight.data.copy_(weight(path, layer))
        layer.weight_quantizer.mode = Mode.OFF
    return made


def by_llama_cpp(model: nn.Module, batches: list[Any], llama: LlamaCpp) -> nn.Module:
    """By llama.cpp, whose importance of a column is the mean square of its inputs."""
    squares: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, path=path: squares.update(
                {path: squares.get(path, torch.zeros(())) + given[0].flatten(0, -2).square().mean(0)}
            )
        )
        for path, layer in layers(model).items()
    ]
    with torch.no_grad(), fq.disabled(model):
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    return with_weights(model, lambda path, one: llama(one.weight, kind(one), squares[path] / len(batches)))


@torch.no_grad()
def distance(model: nn.Module, net: nn.Module, batches: list[Any]) -> float:
    return sum(float((model(**one).logits - net(**one).logits).double().square().sum()) for one in batches)


def by_auto_round(model: Any, name: str, batches: list[Any], steps: int) -> nn.Module:
    """By the file that AutoRound exports; it asks for a tokenizer and does not use it."""
    from auto_round import AutoRound
    from auto_round.export.export_to_gguf.llama_cpp_conversion import get_conversion
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

    class Tokenizer(PreTrainedTokenizerBase):
        pad_token = None

    scheme, ids = f"gguf:{name.lower()}_s", [batch["input_ids"] for batch in batches]
    net = LlamaForCausalLM(model.config)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict={key: model.state_dict()[key] for key in net.state_dict()})
        get_conversion(folder).get_model_class("LlamaForCausalLM").set_vocab = lambda _: None  # there is none
        given = {"dataset": loader(ids), "seqlen": ids[0].shape[1], "nsamples": sum(map(len, ids)), "batch_size": 8}
        how = {"device_map": "cpu", "enable_torch_compile": False}
        tuned = AutoRound(
            LlamaForCausalLM.from_pretrained(folder), Tokenizer(), scheme=scheme, iters=steps, **given, **how
        )
        tuned.quantize_and_save(f"{folder}/out", format=scheme)
        (file,) = Path(folder).rglob("*.gguf")
        found: Any = fq.read(file, net)
    theirs = layers(found)
    assert {path: kind(one) for path, one in theirs.items()} == {path: kind(one) for path, one in layers(model).items()}
    return with_weights(model, lambda path, _: theirs[path].quantized_weight())


@torch.no_grad()
def perplexity(model: Any, batches: list[Any]) -> float:
    """The perplexity of the next byte."""
    losses = [float(model(**one, labels=one["input_ids"]).loss) for one in batches]
    return math.exp(sum(losses) / len(losses))


def prepared(net: nn.Module, name: str) -> nn.Module:
    """A copy in a type; as llama-quantize and AutoRound do, some layers have another one."""
    rules = {pattern: preset(own) for pattern, own in MIXED.get(name, {}).items()}
    return fq.prepare(copy.deepcopy(net), preset(name), skip=["lm_head", "model.embed_tokens"], rules=rules)


def in_a_type(net: nn.Module, name: str, batches: list[Any], llama: LlamaCpp) -> Iterator[tuple[str, nn.Module]]:
    """The model with weights of a type, by what chooses the codes."""
    model = prepared(net, name)
    yield "llama.cpp, importance matrix", by_llama_cpp(model, batches, llama)
    for steps in STEPS if importlib.util.find_spec("auto_round") else ():
        yield f"AutoRound, {steps} steps", by_auto_round(model, name, batches, steps)
    yield "`prepare`", model
    fq.calibrate(model)
    yield "`calibrate`", model
    fq.ptq.improve(model, batches, "best", progress=False)
    yield '`improve`, "best"', model


def print_models(net: nn.Module, types: list[str], llama: LlamaCpp) -> None:
    """Print the second table."""
    ids, own = (
        [{"input_ids": batch["input_ids"]} for batch in language_model.batches(16, seed=seed)] for seed in (2, 7)
    )
    language_model.TEXT = OTHER_TEXT.read_bytes()
    new = [{"input_ids": batch["input_ids"]} for batch in language_model.batches(8, seed=5)]
    size, plain = sum(4 * p.numel() for p in net.parameters()), f"{perplexity(net, own):.3f}, 0"
    head, rows = ["codes by"], {f"float, {size / 1e6:.2f} MB": [plain] * len(types)}
    for name in types:
        with TemporaryDirectory() as folder:
            size = fq.deliver(prepared(net, name), folder, "gguf").stat().st_size
        head.append(f"{name}, {size / 1e6:.2f} MB")
        start, first = time.perf_counter(), 0.0
        for by, model in in_a_type(net, name, ids, llama):
            seconds, error = time.perf_counter() - start, distance(model, net, new)
            first = first or error
            rows.setdefault(by, []).append(f"{perplexity(model, own):.3f}, {error / first:.3f}")
            print(f"{name} by {by}: {rows[by][-1]}, {seconds:.0f} s", file=sys.stderr, flush=True)
            start = time.perf_counter()
    print("perplexity, squared error of logits on another text over llama.cpp's")
    for row in (head, ["---"] * len(head), *([by, *cells] for by, cells in rows.items())):
        print(f"| {' | '.join(row)} |")


def main(types: list[str]) -> None:
    """Print both tables."""
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    if not folder:
        raise SystemExit("LLAMA_CPP_LIB_PATH must name the folder of llama.cpp's libggml-base.so")
    torch.set_num_threads(1)
    llama, net = LlamaCpp(folder), language_model.trained(150)
    torch.manual_seed(0)
    normal = [torch.randn(256, 4096) * 0.02]
    trained = [layer.weight.detach() for layer in layers(net).values()]
    print("squared error of weights over llama.cpp's: largest values, searched; seconds per million weights")
    for name in types or TYPES:
        rows = [weight_rows(name, weights, llama) for weights in (normal, trained)]
        shown = (f"{plain:.3f} {searched:.3f}" for plain, searched, _ in rows)
        print(f"{name:7} normal {'   trained '.join(shown)}   {rows[0][2]:.1f} s", flush=True)
    print_models(net, [one for one in OF_MODELS if not types or one in types], llama)


if __name__ == "__main__":
    main(sys.argv[1:])
