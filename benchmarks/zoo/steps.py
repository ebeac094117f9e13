"""The steps, by letter. A step is one function; it raises where the package is wrong, and may return what to note."""

from __future__ import annotations

import copy
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fakequant as fq
from fakequant.data.batches import run_batch
from fakequant.errors import CoverageWarning
from fakequant.model.run.outputs import record
from fakequant.model.summary import quantized_parameters, unquantized
from fakequant.nn import QuantizedLayer
from fakequant.nn.quantizer import quantizers

from .case import PRESET, TARGET, Case, WrongError, check_finite, check_same_bits, decibels, mapped, tensors
from .products import PRODUCT, count_products, kind_of

Note = dict[str, Any] | None


class NotForThisError(Exception):
    """The step means nothing for this architecture."""


@dataclass(frozen=True)
class Step:
    """One column of the matrix.

    Args:
        title: what is done and what must hold.
        run: does it; raises where it fails.
        in_float: the same with the float model, tried where `run` fails; None where it cannot fail.
        changes: whether the calibrated model is another one afterwards.
    """

    title: str
    run: Callable[[Case], Note]
    in_float: Callable[[Case], Any] | None = None
    changes: bool = False


def _of_model(title: str, run: Callable[[Case, nn.Module], Note], changes: bool = False) -> Step:
    """A step that does the same with the calibrated model and with the float one."""
    return Step(title, lambda case: run(case, case.calibrated()), lambda case: run(case, case.float()), changes)


def _prepare(case: Case) -> Note:
    """Prepare the model; it must warn of the class with most weights that stay in float."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = case.prepare(case.float())
    left = _largest_left(model, case.batches[0])
    if left and not any(left in str(one.message) for one in caught):
        raise WrongError(f"prepare leaves weights of {left} in float and does not warn of it")
    layers = sum(isinstance(module, QuantizedLayer) for module in model.modules())
    said = [str(one.message).partition(" (fakequant.summary")[0] for one in caught if one.category is CoverageWarning]
    return {"layers": layers, "sites": len(fq.site_plan(model).sites), "said": said}


def _largest_left(model: nn.Module, batch: Any) -> str | None:
    """The class with most parameters that stay in float; norms, biases and scalars have one axis and do not count.

    What a quantizer of a function gets, as the weight of a router, or what is computed from it, does not stay in float.
    """
    taken = {p for module in model.modules() if isinstance(module, QuantizedLayer) for p in module.parameters()}
    taken |= quantized_parameters(model, record(model, lambda: run_batch(model, batch)))
    sizes: dict[str, int] = {}
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p not in taken and sum(n > 1 for n in p.shape) >= 2]
        if own:
            sizes[type(module).__name__] = sizes.get(type(module).__name__, 0) + sum(p.numel() for p in own)
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


def _plain_state_before(case: Case) -> Note:
    state = case.float(seed=1).state_dict()
    case.prepare(case.float()).load_state_dict(state, strict=True)


def _plain_state_after(case: Case) -> Note:
    case.calibrated().load_state_dict(case.float().state_dict(), strict=True)


def _plain_state_in_float(case: Case) -> None:
    case.float().load_state_dict(case.float(seed=1).state_dict(), strict=True)


def _calibrate(case: Case) -> Note:
    """Calibrate a model fresh from a state dict, and one that also ran before: both must get the same ranges."""
    state, found = case.float(seed=1).state_dict(), []
    for runs_first in (False, True):
        model = case.float()
        model.load_state_dict(state)
        if runs_first:
            case.outputs(model)
        found.append(quantizers(case.calibrate(case.prepare(model))))
    differing = [name for name, one in found[0].items() if not _same_buffers(one, found[1][name])]
    if differing:
        raise WrongError(
            f"a model that ran once before gets other ranges in {len(differing)} quantizers: {differing[0]}"
        )


def _same_buffers(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _coverage(case: Case) -> Note:
    model = case.calibrated()
    counted = count_products(model, lambda: run_batch(model, case.batches[0]))
    note: dict[str, Any] = {
        "share": round(counted.share, 4),
        "in float": [[path, name, why, round(share, 4)] for path, name, why, share in counted.largest()],
    }
    left = unquantized(model, case.batches[0])
    note["products"] = sorted({one.name for one in left if one.is_product})
    note["others"] = sum(not one.is_product for one in left)
    named = {kind_of(one.name) for one in left if one.is_product}
    # Attention may compute matrix products within.
    unnamed = counted.kinds() - named - ({PRODUCT} if "attention" in named else set())
    if unnamed:
        names = ", ".join(name for _, name, _ in counted.in_float if kind_of(name) in unnamed)
        raise WrongError(f"unquantized names no {', '.join(sorted(unnamed))}: {names}", note)
    return note


@contextmanager
def _one_way() -> Iterator[None]:
    """Functions that torch computes in two ways, with other bits, are computed in one.

    Torch takes the fast path of attention in float alone. torchvision compiles its RoIAlign where it has no kernel for
    it, which torch's compiler does in float alone.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _disabled(case: Case) -> Note:
    model = case.calibrated()
    with _one_way():
        exact = case.outputs(case.float())
        with fq.disabled(model):
            check_same_bits(case.outputs(model), exact, "disabled against float")
    outputs = case.outputs(model)
    check_finite(outputs, exact, "quantized")
    return {"dB": decibels(outputs, exact)}


def _train(case: Case) -> Note:
    """One step of training: every parameter that has a finite gradient in float has one."""
    missing = _without_gradient(case, case.calibrated())
    if missing:
        missing -= _without_gradient(case, case.float())
    if missing:
        raise WrongError(f"{len(missing)} parameters get no finite gradient: {min(missing)}")


def _train_in_float(case: Case) -> None:
    _without_gradient(case, case.float())


def _without_gradient(case: Case, model: nn.Module) -> set[str]:
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    outputs = [y for y in tensors(run_batch(model, case.batches[0])) if y.requires_grad]
    sum((y.float().square().mean() for y in outputs), torch.zeros(())).backward()
    missing = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    optimizer.step()
    return missing


def _onnx(case: Case) -> Note:
    model = case.calibrated()
    with tempfile.TemporaryDirectory() as folder:
        written = fq.export_onnx(model, case.batches[0], Path(folder, "model.onnx"))
        report = fq.verify_onnx(written.path, model, case.batches[:1])
    if not report.exact:
        lines = [line for line in str(report).splitlines() if line]
        raise WrongError(f"the file is not exact: {lines[-1]}")
    return {"quantizers": len(written.quantizers), "left out": len(written.left_out), "differing": report.differing}


def _onnx_in_float(case: Case) -> None:
    args, kwargs = case.example
    with tempfile.TemporaryDirectory() as folder:
        torch.onnx.export(case.float(), args, f"{folder}/model.onnx", kwargs=kwargs, dynamo=True, verbose=False)


def _export(case: Case, model: nn.Module) -> Note:
    args, kwargs = case.example
    with torch.no_grad():
        found = tensors(torch.export.export(model, args, kwargs, strict=False).module()(*args, **kwargs))
    check_same_bits(found, case.outputs(model), "torch.export")


def _compile(case: Case, model: nn.Module) -> Note:
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    check_same_bits(case.outputs(compiled), case.outputs(model), "torch.compile")


def _save_and_load(case: Case) -> Note:
    model = case.calibrated()
    with tempfile.TemporaryDirectory() as folder:
        fq.save(model, Path(folder, "checkpoint"))
        loaded = fq.load(case.float(seed=1), Path(folder, "checkpoint"))
    check_same_bits(case.outputs(loaded), case.outputs(model), "loaded")


def _capture(case: Case) -> Note:
    model, (args, kwargs) = case.calibrated(), case.example
    graph = fq.ir.capture(model, case.batches[0])
    found = graph.run(*tensors([*args, *kwargs.values()]))
    check_same_bits(tensors(found), case.outputs(model), "graph")
    return {"operations": len(graph.ops)}


def _copies(case: Case, model: nn.Module) -> Note:
    expected = case.outputs(model)
    check_same_bits(case.outputs(copy.deepcopy(model)), expected, "copy.deepcopy")
    check_same_bits(case.outputs(pickle.loads(pickle.dumps(model))), expected, "pickle")


def _autocast(case: Case, model: nn.Module) -> Note:
    expected = case.outputs(model)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = case.outputs(model)
    check_finite(outputs, expected, "autocast")
    return {"dB": decibels(outputs, expected)}


def _nvfp4(case: Case) -> Note:
    model = case.calibrate(fq.prepare(case.float(), "NVFP4"), unseen="float")
    outputs, exact = case.outputs(model), case.outputs(case.float())
    check_finite(outputs, exact, "NVFP4")
    return {"dB": decibels(outputs, exact)}


def _auto(case: Case) -> Note:
    model = case.calibrated()
    simulated = case.outputs(model)
    fq.set_execution(model, "auto")
    outputs = case.outputs(model)
    check_finite(outputs, simulated, "auto")
    return {"dB": decibels(outputs, simulated)}


def _in(dtype: torch.dtype) -> Callable[[Case, nn.Module], Note]:
    def run(case: Case, model: nn.Module) -> Note:
        expected = case.outputs(model)
        batch = mapped(lambda x: x.to(dtype) if x.is_floating_point() else x, case.batches[0])
        check_finite(case.outputs(model.to(dtype), batch), expected, str(dtype))

    return run


def _trace(case: Case, model: nn.Module) -> Note:
    args, kwargs = case.example
    given: dict[str, Any] = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    with torch.no_grad():
        traced: Any = torch.jit.trace(model, **given, strict=False, check_trace=False)
        found = tensors(traced(*args, **kwargs))
    check_same_bits(found, case.outputs(model), "torch.jit.trace")


def _pretrained(case: Case) -> Note:
    model: Any = case.calibrated()
    if not hasattr(model, "save_pretrained"):
        raise NotForThisError
    from fakequant.integrations.transformers import enable_saving

    with tempfile.TemporaryDirectory() as folder:
        enable_saving(model).save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
    check_same_bits(case.outputs(loaded), case.outputs(model), "from_pretrained")


def _pretrained_in_float(case: Case) -> None:
    model: Any = case.float()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
    check_same_bits(case.outputs(loaded), case.outputs(model), "from_pretrained")


def _sensitivity(case: Case) -> Note:
    found = fq.sensitivity(case.calibrated(), case.batches[:1], progress=False)
    if wrong := [one.layer for one in found if math.isnan(one.value)]:
        raise WrongError(f"{len(wrong)} layers have NaN: {wrong[0]}")
    return {"worst": found[0].layer, "dB": round(found[0].value, 1)}


def _improve(prepare: Callable[[Case], nn.Module], steps: str) -> Callable[[Case], Note]:
    """No layer may lose more than by rounding to nearest, and what was chosen must survive saving and loading."""

    def run(case: Case) -> Note:
        model = prepare(case)
        found = fq.ptq.improve(model, case.batches, steps, progress=False)
        if worse := [one.layer for one in found.layers if not one.after <= one.before]:
            raise WrongError(f"{len(worse)} layers lose more than by rounding to nearest: {worse[0]}")
        outputs = case.outputs(model)
        check_finite(outputs, case.outputs(case.float()), "improved")
        with tempfile.TemporaryDirectory() as folder:
            fq.save(model, Path(folder, "checkpoint"))
            loaded = fq.load(case.float(seed=1), Path(folder, "checkpoint"))
        check_same_bits(case.outputs(loaded), outputs, "loaded")
        said = found.conclusions
        return {"left": round(found.remaining_error, 4), "before": found.before, "after": found.after, "said": said}

    return run


def _weights_of_4_bits(case: Case) -> nn.Module:
    return case.calibrate(fq.prepare(case.float(), "w4a16"), unseen="float")


STEPS: dict[str, Step] = {
    "a": Step(f'`prepare(model, "{PRESET}", example, target="{TARGET}")`, which names what stays in float', _prepare),
    "o": Step("a plain float state dict, strict, loads after `prepare`", _plain_state_before, _plain_state_in_float),
    "b": Step("`calibrate`; a model fresh from a state dict gets the ranges of one that ran before", _calibrate),
    "p": Step("a plain float state dict, strict, loads after `calibrate`", _plain_state_after, _plain_state_in_float),
    "c": Step("`unquantized` names every kind of product left in float", _coverage),
    "d": Step(
        "`disabled` has the bits of the float model, without torch's fast path of attention and compiled RoIAlign",
        _disabled,
    ),
    "f": Step("`export_onnx`, and `verify_onnx` says exact", _onnx, _onnx_in_float),
    "g": _of_model("`torch.export` gives the same bits", _export),
    "h": _of_model('`torch.compile(fullgraph=True, backend="aot_eager")` gives the same bits', _compile),
    "i": Step("`save`, and `load` into a model with other weights", _save_and_load),
    "j": Step("`ir.capture(...).run` gives the same bits", _capture, lambda case: _export(case, case.float())),
    "k": _of_model("deepcopy and pickle give the same bits", _copies),
    "l": _of_model("bfloat16 autocast", _autocast),
    "m": Step("NVFP4", _nvfp4),
    "s": _of_model("`torch.jit.trace` gives the same bits", _trace),
    "t": Step("`save_pretrained`, `from_pretrained` give the same bits", _pretrained, _pretrained_in_float),
    "u": Step("`sensitivity`", _sensitivity),
    "v": Step(
        '`ptq.improve(..., "fast")`; no layer is worse, `save`, `load`', _improve(Case.calibrated, "fast"), changes=True
    ),
    "w": Step('`prepare(model, "w4a16")`, `ptq.improve(..., "best")`, likewise', _improve(_weights_of_4_bits, "best")),
    "e": Step("a step of training gives every parameter its gradient", _train, _train_in_float, changes=True),
    "n": Step('`set_execution(model, "auto")`', _auto, changes=True),
    "q": _of_model("`model.to(torch.bfloat16)`", _in(torch.bfloat16), changes=True),
    "r": _of_model("`model.half()`", _in(torch.float16), changes=True),
}
# What one run makes of every architecture; the others are named on the command line.
USUAL = "acdefghijkqs"
