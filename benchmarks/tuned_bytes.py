"""Fine-tune a trained byte model in few bits, beside torchao's and ModelOpt's quantization-aware training.

python -m benchmarks.tuned_bytes                                  # three seeds: about 11 CPU minutes
python -m benchmarks.tuned_bytes --seeds 1 --only W2A8 --ways fakequant

All begin at one float model and get the same batches, loss, optimizer and learning rates. In each the weights and the
inputs of the linear layers of the blocks are quantized, and nothing else. Integer weights have a scale for each group
of 32 and no zero point. Integer inputs have both for each token, without the zero point in ModelOpt, which has none for
them. torchao has NVFP4, and ModelOpt both FP4 formats, for a GPU alone; such a row says what they raise.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq
from examples.demo import text
from fakequant import qat

FEATURES, FLOAT_STEPS = 64, 800
MXFP4, NVFP4 = "MXFP4", "NVFP4"
BITS = {"W4A4": (4, 4), "W3A8": (3, 8), "W2A8": (2, 8)}
MOST_LEARNED = 3
"""The most bits whose scales are learned; with 4, scales that follow the weights won in all three seeds."""
GROUP, TOKENS, MX_EVEN = 32, "per_token asymmetric", "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:even"
NVFP4_SPEC = "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor"
ROWS = (*BITS, NVFP4, MXFP4)
Way = Callable[[nn.Module, str, text.Corpus, argparse.Namespace, int], nn.Module]


def float_model(corpus: text.Corpus, folder: Path, seed: int) -> nn.Module:
    """The model that all begin at; kept in a folder and read from there."""
    path, model = folder / f"bytes {seed}.pt", text.Transformer(FEATURES)
    if path.exists():
        model.load_state_dict(torch.load(path))
    else:
        model = text.train(corpus, FLOAT_STEPS, FEATURES, seed)
        torch.save(model.state_dict(), path)
    return model.eval()


def schedule(given: argparse.Namespace) -> qat.Schedule:
    """One epoch of the same learning rates for all: half a cosine."""
    return qat.Schedule(given.rate, 1, fraction=1.0, start=1.0)


def fitted(model: nn.Module, corpus: text.Corpus, given: argparse.Namespace, seed: int) -> nn.Module:
    """A model after the steps of a plain loop."""
    optimizer = text.adamw(model.parameters())
    windows = text.Windows(corpus.training, given.steps, seed + 100)
    text.fit(model, windows, optimizer, qat.scheduler(optimizer, schedule(given), given.steps))
    return model


def prepared(model: nn.Module, row: str, batches: list[Tensor], **changed: Any) -> nn.Module:
    """A model in the formats of a row; weights of 2 bits have the levels {-1.5, -0.5, 0.5, 1.5}, which have no zero."""
    if row in BITS:
        bits, input = BITS[row]
        spec = {2: "int2_midrise"}.get(bits, f"int{bits}")
        weight = fq.TensorConfig(f"{spec} per_block(-1:{GROUP})", dynamic=bits > MOST_LEARNED)
        given = fq.TensorConfig(f"int{input} {changed.get('inputs', TOKENS)}", dynamic=True)
    else:
        # `even` loses less of a block's largest value than the preset's `floor`.
        spec = MX_EVEN if row == MXFP4 else NVFP4_SPEC
        weight = given = fq.TensorConfig(spec, dynamic=True)
    fq.prepare(model, fq.Config(row, (fq.Rule("blocks.*", input=given, weight=weight, layers=("Linear",)),)))
    fq.calibrate(model, batches, progress=False)
    return model


def ours(**changed: Any) -> Way:
    """`finetune` with scales that follow the weights, or learned ones; `taught` is the weight of the float teacher."""

    def run(model: nn.Module, row: str, corpus: text.Corpus, given: argparse.Namespace, seed: int) -> nn.Module:
        taught = changed.get("taught")
        teacher = None if taught is None else qat.Distillation(copy.deepcopy(model), weight=taught)
        model = prepared(model, row, calibration(corpus, seed), **changed)
        scales = qat.Scales.LEARNED if BITS.get(row, (4, 4))[0] <= MOST_LEARNED else qat.Scales.FIXED
        options = qat.Options(scales=scales, optimizer=text.adamw, progress=False)
        windows = text.Windows(corpus.training, given.steps, seed + 100)
        qat.finetune(model, windows, text.loss, schedule(given), options, teacher=teacher)
        return model

    return run


def calibration(corpus: text.Corpus, seed: int) -> list[Tensor]:
    """Eight batches of bytes [16, CONTEXT]."""
    return [one for one, _ in text.Windows(corpus.training, 8, seed)]


def torchao(model: nn.Module, row: str, corpus: text.Corpus, given: argparse.Namespace, seed: int) -> nn.Module:
    """Its QATConfig: ranges of weights and inputs follow them at each step."""
    from torchao.prototype.qat import MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig, QATStep

    if row in BITS:
        weight, input = (getattr(torch, f"int{bits}") for bits in BITS[row])
        inputs = IntxFakeQuantizeConfig(input, "per_token", is_symmetric=False)
        weights = IntxFakeQuantizeConfig(weight, group_size=32, is_symmetric=True)
    else:
        inputs = weights = MXFakeQuantizeConfig() if row == MXFP4 else NVFP4FakeQuantizeConfig()
    config = QATConfig(activation_config=inputs, weight_config=weights, step=QATStep.PREPARE)
    quantize_(model, config, filter_fn=lambda one, name: isinstance(one, nn.Linear) and name.startswith("blocks."))
    return fitted(model, corpus, given, seed)


def modelopt(model: nn.Module, row: str, corpus: text.Corpus, given: argparse.Namespace, seed: int) -> nn.Module:
    """Its `mtq.quantize` by the largest magnitude, then the plain loop."""
    import modelopt.torch.quantization as mtq  # pyright: ignore[reportMissingImports]

    if row in BITS:
        weight, input = BITS[row]
        weights: dict[str, Any] = {"num_bits": weight, "block_sizes": {-1: 32, "type": "static"}}
        inputs: dict[str, Any] = {"num_bits": input, "block_sizes": {-1: None, "type": "dynamic"}}
    else:
        size, scale = (32, (8, 0)) if row == MXFP4 else (16, (4, 3))
        weights = {"num_bits": (2, 1), "block_sizes": {-1: size, "type": "dynamic", "scale_bits": scale}}
        inputs = weights
    chosen = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "blocks.*weight_quantizer", "cfg": weights},
        {"quantizer_name": "blocks.*input_quantizer", "cfg": inputs},
    ]
    batches = [one for one, _ in text.Windows(corpus.training, 8, seed)]
    mtq.quantize(model, {"quant_cfg": chosen, "algorithm": "max"}, lambda net: [net(one) for one in batches])
    return fitted(model, corpus, given, seed)


WAYS: dict[str, tuple[Way, tuple[str, ...]]] = {
    "float": (lambda model, row, *rest: fitted(model, *rest), ("W4A4",)),
    "fakequant": (ours(), ROWS),
    "torchao": (torchao, ROWS),
    "ModelOpt": (modelopt, ROWS),
    "fakequant, taught": (ours(taught=0.5), (NVFP4, MXFP4)),
    "fakequant, inputs in groups of 32": (ours(inputs="per_block(-1:32) asymmetric"), ("W4A4",)),
}
"""What is compared, and in which rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=1e-3, help="the first learning rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--ways", default="", help="ways whose name contains this")
    parser.add_argument("--folder", type=Path, default=Path("build/tuned_bytes"), help="keeps the float models")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    corpus = text.load_corpus()
    floats = [float_model(corpus, given.folder, seed) for seed in range(given.seeds)]
    for row in ROWS:
        for name, (way, rows) in WAYS.items():
            if row in rows and given.only in row and given.ways in name:
                print(json.dumps({"row": row, "way": name} | measured(way, row, floats, corpus, given)), flush=True)


def measured(
    way: Way, row: str, floats: list[nn.Module], corpus: text.Corpus, given: argparse.Namespace
) -> dict[str, Any]:
    """The losses of all seeds on held-out bytes, and on those to choose settings by; or what a way raises."""
    begun, found, chosen_by = time.process_time(), list[float](), list[float]()
    try:
        for seed, model in enumerate(floats):
            tuned = way(copy.deepcopy(model), row, corpus, given, seed)
            found.append(text.nats_per_byte(tuned.eval(), corpus.held_out))
            chosen_by.append(text.nats_per_byte(tuned, corpus.development))
    except (AssertionError, RuntimeError, ValueError) as error:
        return {"raises": f"{type(error).__name__}: {error}"[:200]}
    seconds = round((time.process_time() - begun) / len(floats), 1)
    return {
        "nats": round(statistics.fmean(found), 4),
        "seeds": [round(one, 4) for one in found],
        "development": round(statistics.fmean(chosen_by), 4),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
