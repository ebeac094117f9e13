"""Run a recipe: calibrate and fine-tune its float model, export and verify an ONNX file, write a report."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fakequant.calibration import Calibrator, calibrators, find_method
from fakequant.cli.batches import NamedBatches
from fakequant.cli.generation import CHECKPOINT, GRAPH, ONNX, REPORT, publish, results_folder, staged
from fakequant.cli.recipe import Recipe, load_recipe
from fakequant.cli.steps import Steps
from fakequant.errors import ConfigError, ExportError, GraphError, VerificationError, nearest
from fakequant.export import ExportReport, VerifyReport, export_onnx, verify_onnx
from fakequant.export.style import Style
from fakequant.files import write_whole
from fakequant.ir import capture, to_text
from fakequant.model.batches import run_batch
from fakequant.model.calibrate import calibrate
from fakequant.model.checkpoint import load, save
from fakequant.model.choice import AUTO
from fakequant.model.config import Config, as_execution
from fakequant.model.execution import set_execution
from fakequant.model.modes import evaluating
from fakequant.model.prepare import prepare
from fakequant.model.presets import find_preset
from fakequant.model.summary import summary
from fakequant.model.unseen import check_unseen
from fakequant.nn import Execution, cached_weights
from fakequant.ptq import improve
from fakequant.report import (
    RESULTS,
    Accuracy,
    Improved,
    ReportData,
    Section,
    environment,
    improved,
    layers_left,
    measure,
    sizes,
    verification,
    with_advice,
    with_ranges,
    write_report,
    write_results,
)
from fakequant.report.terminal import print_report

_IMPROVE = ("best", "fast")


@dataclass(frozen=True)
class Job:
    """The arguments of `fakequant quantize`.

    Args:
        recipe: the recipe file.
        preset: name of a preset, in upper or lower case.
        method: calibrator of the activations.
        out: the folder for `checkpoint`, `model.onnx`, `graph.txt` and `report.html`.
        train: whether to fine-tune with the recipe's `train(model)`, if it is defined.
        compare: whether to calibrate with every other method too, for the report.
        static: whether the exported model takes only batches of the size of the first.
        style: the dialect of the exported file, see `export_onnx`.
        execution: how layers compute while they are measured: "simulate", "auto" or "integer", see `set_execution`.
            The checkpoint keeps it; it does not change the exported file.
        unseen: how to treat layers that no batch reaches, see `calibrate`.
        improve: the steps of `fakequant.ptq.improve` after calibration, "best" or "fast"; None for none.
        verbose: whether to print tables of all layers, and the traceback if the model fails on a batch.
    """

    recipe: Path
    preset: str
    method: str
    out: Path
    train: bool = True
    compare: bool = False
    static: bool = False
    style: str = "portable"
    execution: str = "simulate"
    unseen: str = "error"
    improve: str | None = None
    verbose: bool = False


@dataclass
class _Progress:
    """The results so far; the report shows them even if a later step fails."""

    recipe: Recipe
    job: Job
    steps: Steps
    noted: NamedBatches = field(default_factory=NamedBatches)
    remarks: list[str] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    calibrators: dict[str, dict[str, Calibrator]] = field(default_factory=dict)
    improvement: list[Improved] = field(default_factory=list)
    missing: dict[Section, str] = field(default_factory=dict)

    def measure(self, model: nn.Module, format: str, method: str) -> None:
        """Add the metric of a model, if the recipe defines one."""
        if not self.recipe.offers("evaluate"):
            return
        with evaluating(model), cached_weights(model), torch.no_grad():
            value = self.recipe.evaluate(model)
        self.accuracy.append(Accuracy(format, method, value))
        self.steps.note(f"{format} {method}: {value:.6g}")

    def batches(self) -> Iterable[Any]:
        """The calibration batches, from the first."""
        return self.noted.of(self.recipe.calibration_batches())

    def named(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which the error of a batch names the batch; not if the traceback is wanted."""
        return nullcontext() if self.job.verbose else self.noted.failures_named(model)


@dataclass(frozen=True)
class _Written:
    """The outcome of a job.

    Attributes:
        data: the content of the report.
        names: the names of the files and folders that were written.
        refusal: the error of the export, or None.
        exact: whether the exported file computes the same as the model.
    """

    data: ReportData
    names: list[str]
    refusal: ExportError | None
    exact: bool


def run(job: Job, console: Console) -> ReportData:
    """Run a job and return the content of its report.

    The files of an earlier job are replaced in one step when all new files are written. If anything fails before, they
    are unchanged.

    Raises:
        ConfigError: an unknown preset, method or execution; or the execution is "integer" and a layer does not support
            it.
        ExportError: an unknown style; or ONNX cannot express the model: then checkpoint and report are written anyway.
        OutputError: the folder cannot be written; raised before any work.
        RecipeError: the recipe lacks a function; raised before any work.
        VerificationError: the exported file does not compute the same as the model; all files are written.
        KeyboardInterrupt: with a message that says which files the folder holds.
    """
    config = find_preset(job.preset)
    if job.method != AUTO:
        job = replace(job, method=find_method(job.method))
    Style.parse(job.style)
    as_execution(job.execution)
    check_unseen(job.unseen)
    if job.improve not in (None, *_IMPROVE):
        raise ConfigError(f"unknown steps {job.improve!r} of --improve{nearest(str(job.improve), _IMPROVE)}")
    state = f"nothing was written; the files in {job.out} are unchanged"
    try:
        with results_folder(job.out) as out:
            recipe = load_recipe(job.recipe)
            progress = _Progress(recipe, job, Steps(console, _number_of_steps(job, recipe)))
            model = quantized_model(job, config, progress)
            with staged(out) as folder:
                written = _write(job, config, progress, model, folder)
                state = f"{out} holds the files of the previous run or of this run, not of both"
                publish(folder, out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted: {state}") from None
    progress.steps.note(f"Written: {', '.join(str(out / name) for name in written.names)}")
    if written.refusal is not None:
        raise written.refusal
    if not written.exact:
        raise VerificationError(f"{out / ONNX} does not compute the same as the model; see {out / REPORT}")
    return written.data


def _number_of_steps(job: Job, recipe: Recipe) -> int:
    optional = (recipe.offers("evaluate"), job.improve is not None, job.train and recipe.offers("train"))
    return 6 + sum(optional)


def _write(job: Job, config: Config, progress: _Progress, model: nn.Module, folder: Path) -> _Written:
    """Save, export, verify and report a model."""
    steps, example = progress.steps, example_of(model, progress.recipe.first_batch())
    with steps.step("saving the checkpoint"):
        save(model, folder / CHECKPOINT)
    export, check, refusal = _exported(job, progress, model, example, folder)
    with steps.step("measuring layers"), progress.named(model):
        measured = measure(model, progress.batches())
    with steps.step("writing the report"):
        has_graph = _write_graph(model, example, folder / GRAPH)
        files = {CHECKPOINT: folder / CHECKPOINT} | ({} if export is None else {ONNX: folder / ONNX})
        data = ReportData(
            f"{job.recipe.stem}, quantized to {config.name}",
            summary=(
                f"Recipe {job.recipe.name}, preset {config.name}, activations calibrated with {job.method}.",
                *progress.remarks,
                *_execution_lines(job, model),
                *has_graph,
            ),
            metric="evaluate(model)",
            accuracy=progress.accuracy,
            layers=measured.layers,
            distributions=with_ranges(measured.distributions, progress.calibrators),
            channels=measured.channels,
            improvement=progress.improvement,
            sizes=sizes(files, {} if export is None else {ONNX: export.float_bytes}),
            left=layers_left({config.name: model}, example),
            verifications=[] if check is None else [verification(ONNX, check)],
            environment=environment(),
            missing=progress.missing,
        )
        data = with_advice(data, job.preset)
        write_report(folder / REPORT, data)
        write_results(folder / RESULTS, data)
    print_report(steps.console, data)
    return _Written(data, [*files, REPORT, RESULTS], refusal, check is None or check.exact)


def _exported(
    job: Job, progress: _Progress, model: nn.Module, example: Any, folder: Path
) -> tuple[ExportReport | None, VerifyReport | None, ExportError | None]:
    """Export and verify a model; an error of the export is returned."""
    export: ExportReport | None = None
    try:
        dynamic_shapes = None if job.static else dynamic_batch(example)
        with progress.steps.step("exporting to ONNX"):
            export = export_onnx(model, example, folder / ONNX, dynamic_shapes=dynamic_shapes, style=job.style)
        with progress.steps.step("verifying bit for bit"):
            batches = fitting(progress.recipe.calibration_batches(), example, dynamic_shapes)
            return export, verify_onnx(folder / ONNX, model, batches), None
    except ExportError as error:
        progress.steps.begun += export is None  # the verification that does not happen
        progress.missing[Section.VERIFICATION] = f"The model was not exported: {error}"
        return export, None, error


def _execution_lines(job: Job, model: nn.Module) -> list[str]:
    """Lines for the report: how many layers use integer execution, and why the others do not."""
    if as_execution(job.execution) is Execution.SIMULATE:
        return []
    layers = summary(model).layers
    integer = [layer for layer in layers if layer.execution == "integer"]
    simulated = [f"{layer.name} is simulated: {layer.why_simulated}." for layer in layers if layer.why_simulated]
    return [f"Measured with integer execution in {len(integer)} of {len(layers)} layers.", *simulated]


def _write_graph(model: nn.Module, example: Any, path: Path) -> list[str]:
    """Write a model's graph as text; returns a line for the report."""
    try:
        with evaluating(model):
            graph = capture(model, example)
    except GraphError as error:
        return [f"The graph is missing, because the model could not be captured: {error}"]
    write_whole(path, to_text(graph).encode())
    return [f"{path.name} lists every operation of the graph; Netron shows that of {ONNX}."]


def quantized_model(job: Job, config: Config, progress: _Progress) -> nn.Module:
    """Prepare, calibrate, improve and fine-tune the recipe's model, and measure it after every step."""
    recipe, steps = progress.recipe, progress.steps
    model = recipe.model()
    if recipe.offers("evaluate"):
        with steps.step("measuring float32"):
            progress.measure(model, "float32", "")
    with steps.step("calibrating"):
        set_execution(prepare(model, config), job.execution)
        _calibrate(job, config, progress, model)
    if job.improve is not None:
        with steps.step("choosing weights"), progress.named(model):
            found = improve(model, progress.batches(), job.improve)
            *table, last = str(found).splitlines()
            progress.improvement = improved(found)
            progress.remarks.append(f"Weights chosen by {job.improve} steps: {last}.")
            steps.note("\n".join([*table, last]) if job.verbose else last)
            progress.measure(model, config.name, f"{job.method}, then improved")
    if job.train and recipe.offers("train"):
        with steps.step("fine-tuning"):
            recipe.train(model)
            progress.measure(model, config.name, f"{job.method}, then fine-tuned")
    return model.eval()


def _calibrate(job: Job, config: Config, progress: _Progress, model: nn.Module) -> None:
    """Calibrate a model with the chosen method; copies of it with the others too, where they are compared."""
    if not progress.recipe.offers("evaluate"):
        progress.missing[Section.ACCURACY] = f"{progress.recipe.path.name} does not define evaluate(model)."
    methods = [method for method in calibrators() if job.compare and method != job.method]
    copies = {method: copy.deepcopy(model) for method in methods} | {job.method: model}
    for method, own in copies.items():
        with progress.named(own):
            progress.calibrators[method] = calibrate(own, progress.batches(), method, unseen=job.unseen)
        progress.measure(own, config.name, method)
    progress.calibrators = {job.method: progress.calibrators.pop(job.method)} | progress.calibrators
    found = {row.method: row.value for row in progress.accuracy if row.method in copies}
    if found and (best := max(found, key=found.__getitem__)) != job.method and found[best] > found[job.method]:
        progress.steps.note(f"{best} was best, and {job.method} is exported; for the other: --method {best}")


def example_of(model: nn.Module, batch: Any) -> Any:
    """Return the arguments that a model takes from a batch: a tuple, or a dict of keyword arguments."""
    seen: list[Any] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs or args), with_kwargs=True, prepend=True
    )
    try:
        with evaluating(model), torch.no_grad():
            run_batch(model, batch)
    finally:
        hook.remove()
    return seen[0]


def dynamic_batch(example: Any) -> Any:
    """Return the `dynamic_shapes` for `export_onnx` that allow any batch size, or None if the batch axis is unclear.

    Axis 0 of a tensor is the batch axis if it is as long as axis 0 of the first tensor. It is unclear for an example
    with one sample, because torch.export treats a length of 1 as a constant.

    >>> dynamic_batch((torch.ones(4, 3), torch.ones(7)))
    ({0: 'batch'}, None)
    """
    sizes = [leaf.shape[0] for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes or sizes[0] < 2:
        return None

    def axes(leaf: Any) -> dict[int, str] | None:
        return {0: "batch"} if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == sizes[0] else None

    return tree_map(axes, example)


def fitting(batches: Iterable[Any], example: Any, dynamic_shapes: Any) -> Iterator[Any]:
    """Yield the batches that fit the exported model: the example's shapes, and any batch size if that is dynamic.

    >>> batches = [torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 5)]
    >>> [len(batch) for batch in fitting(batches, (torch.ones(2, 3),), None)]
    [2]
    """
    kept = slice(0 if dynamic_shapes is None else 1, None)
    shapes = [leaf.shape[kept] for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    for batch in batches:
        arguments = {key: batch[key] for key in example} if isinstance(example, dict) else batch
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if [tensor.shape[kept] for tensor in tensors[: len(shapes)]] == shapes:
            yield batch


def verify_file(path: Path, recipe: Path | None, checkpoint: Path | None) -> VerifyReport:
    """Verify an exported file; with a recipe also compare its weights and outputs with the model.

    Raises:
        VerificationError: the file cannot be read, or fakequant did not write it.
        RecipeError, CheckpointError: the model cannot be rebuilt.
    """
    if recipe is None:
        return verify_onnx(path)
    loaded = load_recipe(recipe)
    model = load(loaded.model(), checkpoint or path.parent / CHECKPOINT)
    return verify_onnx(path, model.eval(), loaded.calibration_batches())
