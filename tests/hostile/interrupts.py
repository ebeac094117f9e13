"""Interrupt every function that changes a model for a while, at many lines; run by hand.

    python tests/hostile/interrupts.py [function ...] [--each 3]      # at lines of the package, the same every time
    python tests/hostile/interrupts.py [function ...] --signals 100   # by signals at random times

Prints one line for a function, and the moments that left something behind; exits 1 if there were any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch._dynamo  # once it is imported, the package also has torch's compiler left out for a while
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import fakequant as fq
from fakequant.data.batches import Batches
from fakequant.delivery import fix_global_scales, llama_cpp_inputs
from fakequant.nn import cached_weights, fixed_ranges
from fakequant.ptq.next_step import next_step
from tests.support.interruption import Case, failures, failures_by_signals, lines_of, moments

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
TARGETS = torch.zeros(2, 2)
IMPROVED_BY = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
SOME_STEPS = ["smooth", "gptq", "drift", "bias"]
PER_TENSOR = fq.Config("tensors", (fq.Rule(input="int8", weight="int8"),))


def plain() -> nn.Module:
    torch.manual_seed(0)
    # Some modules in train mode, some in eval mode.
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model[3].eval()
    return model


def prepared() -> nn.Module:
    return fq.prepare(plain(), fq.presets.INT8)


def calibrated() -> nn.Module:
    model = prepared()
    fq.calibrate(model, [X, 2 * X], "entropy", progress=False)
    return model


def learning() -> nn.Module:
    model = calibrated()
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    return model


def evaluated() -> nn.Module:
    return calibrated().eval()


def folded() -> nn.Module:
    model = fq.qat.fold_batch_norm(prepared(), X)
    fq.calibrate(model, [X], progress=False)
    return model


def weight_only() -> nn.Module:
    return fq.prepare(plain(), fq.presets.INT8_WEIGHT_ONLY)


def uneven() -> nn.Module:
    """A float model with channels and features of different sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight[1] *= 50
        model[1].weight[:, 1] /= 50
        model[1].weight[3] *= 50
    return model


def four_bits() -> nn.Module:
    model = fq.prepare(uneven(), fq.Config("4 bits", (fq.Rule(input="int4", weight="int4 per_channel(0)"),)))
    fq.calibrate(model, IMPROVED_BY, progress=False)
    return model


def smoothed() -> nn.Module:
    model = four_bits()
    fq.ptq.improve(model, IMPROVED_BY, ["smooth"], progress=False)
    return model


def residual() -> nn.Module:
    """A float model whose values behind the first layer can be rotated."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 2))


class Doubles(nn.Module):
    """Calls a module, and a function that gets quantizers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x


def doubles() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Doubles())


def prepare_functions(model: nn.Module) -> nn.Module:
    return fq.prepare(model, fq.Config("functions", (fq.Rule(input="int8", ops=("add",)),)), example=X)


def with_functions() -> nn.Module:
    model = prepare_functions(doubles())
    fq.calibrate(model, [X], progress=False)
    return model


_range = fq.Range(torch.tensor([-3.0]), torch.tensor([1.0]))
_used = fq.calibrate(prepared(), [X / 3], "entropy", progress=False)
_schedule = fq.qat.Schedule(original_lr=0.1, original_epochs=20)
_folder = tempfile.TemporaryDirectory()
_saved = fq.save(calibrated(), Path(_folder.name) / "saved")


def finetune(model: nn.Module) -> object:
    options = fq.qat.Options(fq.qat.Scales.LEARNED, progress=False)
    return fq.qat.finetune(model, [(X, TARGETS)], nn.functional.mse_loss, _schedule, options)


def quantizer(*, learned: bool) -> nn.Module:
    made = fq.nn.Quantizer("uint8 asymmetric")
    made.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([2.0])))
    if learned:
        made.learn("lsq_plus")
    return nn.Sequential(made)


def inside(context, model: nn.Module) -> None:
    with context(model):
        pass


def export(model: nn.Module) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fq.export_onnx(model, X, Path(_folder.name) / "model.onnx")


CASES = {
    "prepare": Case(plain, lambda m: fq.prepare(m, fq.presets.INT8), changes=True),
    "prepare functions": Case(doubles, prepare_functions, changes=True),
    "call functions": Case(with_functions, lambda m: m(X)),
    "calibrate": Case(prepared, lambda m: fq.calibrate(m, [X], progress=False), changes=True),
    "calibrate again": Case(calibrated, lambda m: fq.calibrate(m, [X], progress=False), changes=True),
    "calibrate learned": Case(learning, lambda m: fq.calibrate(m, [X], progress=False), changes=True),
    "calibrate a pattern": Case(calibrated, lambda m: fq.calibrate(m, [X], pattern="0", progress=False), changes=True),
    "prepare a training": Case(
        plain,
        lambda m: fq.qat.Training("int8", [X], scales=fq.qat.Scales.LEARNED, teacher="float").prepare(m),
        changes=True,
    ),
    "recalibrate": Case(calibrated, lambda m: fq.recalibrate(m, _used, "percentile"), changes=True),
    "recalibrate learned": Case(learning, lambda m: fq.recalibrate(m, _used, "percentile"), changes=True),
    "llama_cpp_inputs": Case(
        lambda: fq.prepare(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), "gguf_q8_0", skip=[]),
        llama_cpp_inputs,
        changes=True,
    ),
    "fix_global_scales": Case(
        lambda: fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "nvfp4", skip=[]),
        lambda m: fix_global_scales(m, [X]),
        changes=True,
    ),
    "set_execution": Case(calibrated, lambda m: fq.set_execution(m, "auto"), changes=True),
    "set_scales learned": Case(calibrated, lambda m: fq.qat.set_scales(m, fq.qat.Scales.LEARNED), changes=True),
    "set_scales fixed": Case(learning, lambda m: fq.qat.set_scales(m, fq.qat.Scales.FIXED), changes=True),
    "set_scales by epoch": Case(learning, lambda m: fq.qat.set_scales(m, fq.qat.Scales.EPOCH), changes=True),
    "freeze_batch_norm": Case(plain, fq.qat.freeze_batch_norm, changes=True),
    "fold_batch_norm": Case(prepared, lambda m: fq.qat.fold_batch_norm(m, X), changes=True),
    "merge_batch_norm": Case(folded, fq.qat.merge_batch_norm, changes=True),
    "set_range": Case(lambda: quantizer(learned=False), lambda m: m[0].set_range(_range), changes=True),
    "set_range learned": Case(lambda: quantizer(learned=True), lambda m: m[0].set_range(_range), changes=True),
    "learn": Case(lambda: quantizer(learned=False), lambda m: m[0].learn("lsq_plus"), changes=True),
    "stop_learning": Case(lambda: quantizer(learned=True), lambda m: m[0].stop_learning(), changes=True),
    "bake_weights": Case(calibrated, fq.bake_weights, changes=True),
    "load": Case(plain, lambda m: fq.load(m, _saved)),
    "load without memory": Case(lambda: plain().to("meta"), lambda m: fq.load(m, _saved)),
    "finetune": Case(calibrated, finetune, changes=True, trains=True),
    "improve": Case(four_bits, lambda m: fq.ptq.improve(m, IMPROVED_BY, SOME_STEPS, progress=False), changes=True),
    "improve by best": Case(four_bits, lambda m: fq.ptq.improve(m, IMPROVED_BY, progress=False), changes=True),
    "improve from a checkpoint": Case(
        four_bits,
        lambda m: fq.ptq.improve(m, IMPROVED_BY, "fast", checkpoint=Path(_folder.name) / "improve", progress=False),
        changes=True,
    ),
    "equalize": Case(uneven, lambda m: fq.ptq.equalize(m, X, PER_TENSOR), changes=True),
    "rotate": Case(residual, lambda m: fq.ptq.rotate(m, X), changes=True),
    "fold_scales": Case(smoothed, lambda m: fq.ptq.fold_scales(m, X), changes=True),
    "advise": Case(four_bits, lambda m: next_step(m, Batches(IMPROVED_BY, "report").kept())),
    "sensitivity": Case(calibrated, lambda m: fq.sensitivity(m, [X], progress=False)),
    "sensitivity by a metric": Case(
        evaluated, lambda m: fq.sensitivity(m, [], lambda m: m(X).sum().item(), progress=False)
    ),
    "layer_sqnr": Case(calibrated, lambda m: fq.layer_sqnr(m, [X], progress=False)),
    "disabled": Case(calibrated, lambda m: inside(fq.disabled, m)),
    "cached_weights": Case(calibrated, lambda m: inside(cached_weights, m)),
    "fixed_ranges": Case(learning, lambda m: inside(fixed_ranges, m)),
    "save": Case(calibrated, lambda m: fq.save(m, Path(_folder.name) / "again")),
    "summary": Case(calibrated, lambda m: fq.summary(m, X)),
    "unquantized": Case(prepared, lambda m: fq.unquantized(m, X)),
    "ir.capture": Case(lambda: learning().eval(), lambda m: fq.ir.capture(m, X)),
    "export_onnx": Case(weight_only, export),
}


def main() -> int:
    """Interrupt the functions that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="function", help=", ".join(CASES))
    parser.add_argument("--each", type=int, default=3, help="interrupts at each line of the package that runs")
    parser.add_argument("--most", type=int, default=200, help="interrupts of a function, spread over its lines")
    parser.add_argument("--signals", type=int, default=0, help="signals for each function, instead of lines")
    given = parser.parse_args()
    torch.set_num_threads(1)
    total, wrong = 0, 0
    for name in given.names or CASES:
        if given.signals:
            came, found = failures_by_signals(CASES[name], given.signals)
            print(f"{name}: {given.signals} signals, {came} interrupted it, {len(found)} left something", flush=True)
            print(*(f"  {line}" for line in found), sep="\n", end="\n" if found else "")
            total, wrong = total + came, wrong + len(found)
            continue
        passed = lines_of(CASES[name])
        chosen = moments(passed, given.each)
        chosen = chosen[:: -(-len(chosen) // given.most)]
        found = failures(CASES[name], chosen)
        print(f"{name}: {len(set(passed))} lines, {len(chosen)} interrupts, {len(found)} left something", flush=True)
        print(*(f"  {line}" for line in found), sep="\n", end="\n" if found else "")
        total, wrong = total + len(chosen), wrong + len(found)
    print(f"{total} interrupts, {wrong} left something behind")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
