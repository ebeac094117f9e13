"""Run a recipe: calibrate and fine-tune its float model, export and verify an ONNX file, write a report."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from fakequant.calibration import Calibrator, calibrators, find_method
from fakequant.cli.examples import dynamic_batch, example_of, fitting, write_graph
from fakequant.cli.failures import failures_named
from fakequant.cli.recipe import Recipe, load_recipe
from fakequant.cli.results import CHECKPOINT, GRAPH, ONNX, REPORT, publish, results_folder, staged
from fakequant.cli.settings import Job as Job
from fakequant.cli.steps import Steps
from fakequant.cli.unfinished import Unfinished, held_before, refuse_other_recipe
from fakequant.errors import ConfigError, ExportError, FakeQuantError, VerificationError, first_line, nearest
from fakequant.export import ExportReport, VerifyReport, export_onnx, verify_onnx
from fakequant.export.capability import Style
from fakequant.model.analysis.summary import summary
from fakequant.model.calibration.calibrate import calibrate
from fakequant.model.calibration.observation import check_unseen
from fakequant.model.config import Config
from fakequant.model.execution import set_execution
from fakequant.model.prepare import prepare
from fakequant.model.state.checkpoint import save
from fakequant.model.weights import evaluating
from fakequant.nn import Execution, cached_weights
from fakequant.nn.integer import as_execution
from fakequant.ptq import improve
from fakequant.ptq.advising.next_step import AdviceContext
from fakequant.report import (
    RESULTS,
    Accuracy,
    Improved,
    ReportData,
    Section,
    advised,
    environment,
    improved,
    layers_left,
    measure,
    sizes,
    verification,
    with_ranges,
    write_report,
    write_results,
)
from fakequant.report.terminal import print_report

_IMPROVE = ("best", "fast")


@dataclass
class _Progress:
    """The results so far; the report shows them even if a later step fails."""

    recipe: Recipe
    job: Job
    steps: Steps
    kept: Unfinished
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
        task = self.recipe.task
        self.accuracy.append(Accuracy(format, method, value, negated=task.smaller))
        self.steps.note(f"{format} {method}: {-value if task.smaller else value:.6g}")

    def page(self, config: Config, state: str) -> None:
        """Write the page of what was done so far."""
        self.kept.page(replace(self.data(config), unfinished=f"{state}."))

    def data(self, config: Config) -> ReportData:
        """The content of the report that the steps so far give."""
        static = any(rule.input is not None and not rule.input.dynamic for rule in config.rules)
        ranges = f", activations calibrated with {self.job.method}" if static else ""
        return ReportData(
            title_of(self.recipe.path, config),
            summary=(
                f"Recipe {self.recipe.path.name}, preset {config.name}{ranges}.",
                *self.job.exceptions(),
                *filter(None, [self.job.unknown_gain(), self.recipe.task.said if self.recipe.task.on else ""]),
                *self.remarks,
            ),
            metric=self.recipe.task.label or "evaluate(model)",
            accuracy=list(self.accuracy),
            improvement=list(self.improvement),
            environment=environment(),
            missing=dict(self.missing),
            source=self.recipe.source,
        )

    def named(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context that adds the batch's name to its error, unless the user wants the traceback."""
        return failures_named(model, self.job.verbose)


@dataclass(frozen=True)
class _Written:
    """The outcome of a job.

    Attributes:
        data: the content of the report.
        names: the names of the files and folders that were written.
        refusal: the error of the export, or None.
        passed: whether the exported file computes the same as the model, as ONNX Runtime runs it by default, too.
    """

    data: ReportData
    names: list[str]
    refusal: ExportError | None
    passed: bool


def run(job: Job, console: Console) -> ReportData:
    """Run a job and return the content of its report.

    The files of an earlier job are replaced when all new files are written. If anything fails before, they are
    unchanged; `unfinished` in their folder then holds a page of what was done, and the same job goes on from there.

    Raises:
        ConfigError: an unknown preset, method or execution; or the execution is "integer" and a layer does not support
            it; or the folder holds the results of another recipe.
        ExportError: an unknown style; or ONNX cannot express the model: then checkpoint and report are written anyway.
        OutputError: the folder cannot be written, or another process writes to it; raised before any work.
        RecipeError: the recipe lacks a function; raised before any work.
        VerificationError: the exported file does not compute the same as the model; all files are written.
        KeyboardInterrupt: with a message that says which files the folder holds.
    """
    config = job.config()
    job = replace(job, method=find_method(job.method))
    Style.parse(job.style)
    as_execution(job.execution)
    check_unseen(job.unseen)
    if job.improve not in (None, *_IMPROVE):
        raise ConfigError(f"unknown steps {job.improve!r} of --improve{nearest(str(job.improve), _IMPROVE)}")
    gain = job.unknown_gain()
    state = f"nothing was written; the files in {job.out} are unchanged"
    kept: Unfinished | None = None
    try:
        with results_folder(job.out) as out:
            recipe = load_recipe(job.recipe, job.text, job.trust, job.task)
            if not job.overwrite:
                refuse_other_recipe(out, recipe.source)
            kept = Unfinished(out, recipe.source)
            progress = _Progress(recipe, job, Steps(console, _number_of_steps(job, recipe)), kept)
            if before := held_before(out, recipe.source, title_of(recipe.path, config)):
                progress.steps.note(before)
            if gain:
                progress.steps.note(gain)
            model = quantized_model(job, config, progress)
            with staged(out) as folder:
                written = _write(job, config, progress, model, folder)
                state = f"{out / RESULTS} says whether the files beside it are of one run"
                publish(folder, out)
            kept.remove()
    except KeyboardInterrupt:
        if kept is not None and kept.has_page:
            goes_on = ", and the same command goes on from there" if kept.settings else ""
            state += f"; {kept.folder / REPORT} shows what was done{goes_on}"
        raise KeyboardInterrupt(f"interrupted: {state}") from None
    progress.steps.note(f"Written: {', '.join(str(out / name) for name in written.names)}")
    if written.refusal is not None:
        raise written.refusal
    if not written.passed:
        raise VerificationError(f"{out / ONNX} does not compute the same as the model; see {out / REPORT}")
    return written.data


def title_of(recipe: Path, config: Config) -> str:
    """The title of a run's report."""
    return f"{recipe.stem}, quantized to {config.name}"


def _number_of_steps(job: Job, recipe: Recipe) -> int:
    optional = (recipe.offers("evaluate"), job.improve is not None, job.train and recipe.offers("train"))
    return 6 + sum(optional)


def _write(job: Job, config: Config, progress: _Progress, model: nn.Module, folder: Path) -> _Written:
    """Save, export, verify and report a model."""
    steps, example = progress.steps, example_of(model, progress.recipe.first_batch())
    with steps.step("saving the checkpoint"):
        save(model, folder / CHECKPOINT, packed=job.packed)
    export, check, refusal = _exported(job, progress, model, example, folder)
    progress.page(config, "the file is exported and verified, and the layers are not measured")
    with steps.step("measuring layers"), progress.named(model):
        measured = measure(model, progress.recipe.calibration_batches())
    with steps.step("writing the report"):
        has_graph = write_graph(model, example, folder / GRAPH)
        files = {CHECKPOINT: folder / CHECKPOINT} | ({} if export is None else {ONNX: folder / ONNX})
        floats = {} if export is None else {ONNX: export.float_bytes}
        so_far = progress.data(config)
        data = replace(
            so_far,
            summary=(*so_far.summary, *_execution_lines(job, model), *has_graph),
            layers=measured.layers,
            alone_on=measured.alone_on,
            distributions=with_ranges(measured.distributions, progress.calibrators),
            channels=measured.channels,
            sizes=sizes({job.label(name): path for name, path in files.items()}, floats),
            unquantized=_unquantized(config, progress, model, example),
            verifications=[] if check is None else [verification(ONNX, check)],
        )
        known = AdviceContext(command=job.command, target=job.target)
        data = advised(model, data, measured, progress.recipe.metric, known=known)
        write_report(folder / REPORT, data)
        write_results(folder / RESULTS, data)
    print_report(steps.console, data)
    return _Written(data, [*files, REPORT, RESULTS], refusal, check is None or check.passed)


def _exported(
    job: Job, progress: _Progress, model: nn.Module, example: Any, folder: Path
) -> tuple[ExportReport | None, VerifyReport | None, ExportError | None]:
    """Export and verify a model; an error of the export is returned."""
    export: ExportReport | None = None
    try:
        dynamic_shapes = None if job.static else dynamic_batch(example)
        with progress.steps.step("exporting to ONNX"):
            export = _export(job, model, example, folder / ONNX, dynamic_shapes)
        with progress.steps.step("verifying bit for bit"):
            batches = fitting(progress.recipe.calibration_batches(), example, dynamic_shapes)
            return export, verify_onnx(folder / ONNX, model, batches), None
    except ExportError as error:
        progress.steps.begun += export is None  # the verification that does not happen
        progress.missing[Section.VERIFICATION] = f"The model was not exported: {error}"
        return export, None, error


def _export(job: Job, model: nn.Module, example: Any, path: Path, dynamic_shapes: Any) -> ExportReport:
    """Export a model; torch's message about a model that it cannot trace becomes one line."""
    try:
        return export_onnx(model, example, path, dynamic_shapes=dynamic_shapes, style=job.style)
    except FakeQuantError:
        raise
    except Exception as error:  # torch.export raises errors of many kinds
        if job.verbose:
            raise
        cause = first_line(error)
        cure = "" if job.static else "; --static exports one batch size, for which a model that fixes it can be traced"
        raise ExportError(f"torch cannot trace the model: {cause}{cure} (-v shows the traceback)") from error


def _unquantized(config: Config, progress: _Progress, model: nn.Module, example: Any) -> dict[str, list[str]]:
    """The layers and operations in float; if torch cannot trace the model, none, and the report gets the reason."""
    try:
        return layers_left({config.name: model}, example)
    except Exception as error:  # as above
        progress.missing[Section.LEFT] = f"torch cannot trace the model: {first_line(error)}"
        return {}


def _execution_lines(job: Job, model: nn.Module) -> list[str]:
    """Lines for the report: how many layers use integer execution, and why the others do not."""
    if as_execution(job.execution) is Execution.SIMULATE:
        return []
    layers = summary(model).layers
    integer = [layer for layer in layers if layer.execution == "integer"]
    simulated = [f"{layer.name} is simulated: {layer.why_simulated}." for layer in layers if layer.why_simulated]
    return [f"Measured with integer execution in {len(integer)} of {len(layers)} layers.", *simulated]


def quantized_model(job: Job, config: Config, progress: _Progress) -> nn.Module:
    """Prepare, calibrate, improve and fine-tune the recipe's model; after every step it is measured and kept."""
    recipe, kept, steps = progress.recipe, progress.kept, progress.steps
    if job.overwrite:
        kept.remove()
    model = recipe.model()
    with progress.named(model):
        settings = job.settings(recipe, model, progress.recipe.calibration_batches())
    if not settings:
        steps.note(
            "This run cannot go on after an interrupt: its batches hold more than tensors, arrays, numbers and texts."
        )
    resumed = kept.resume(model, settings)
    if resumed is not None:
        model, progress.accuracy, progress.improvement = resumed, kept.accuracy, kept.improvement
        steps.note(f"Goes on after {kept.done[-1]}, from {kept.folder}; --overwrite starts anew.")
    elif settings and kept.has_state:
        steps.note(
            f"Starts anew: {kept.folder} is of other weights, batches or options. Where model() draws weights, "
            "torch.manual_seed(0) in it gives the same each time."
        )
    if recipe.offers("evaluate"):
        with steps.step("measuring float32", done=resumed is not None) as wanted:
            if wanted:
                progress.measure(model, "float32", "")
    else:
        why = f"{recipe.path.name} does not define evaluate(model): give a function, larger is better."
        progress.missing[Section.ACCURACY] = recipe.task.why_not or why
    for name, work in _model_steps(job, recipe).items():
        with steps.step(name, done=name in kept.done) as wanted:
            if wanted:
                work(job, config, progress, model)
                kept.keep(name, model, progress.accuracy, progress.improvement)
                progress.page(config, f"{name} is done, and the file is not exported")
    return model.eval()


def _model_steps(job: Job, recipe: Recipe) -> dict[str, Callable[..., None]]:
    """The steps that change the model, by name, in their order."""
    found: dict[str, Callable[..., None]] = {"calibrating": _prepare_and_calibrate}
    if job.improve is not None:
        found["choosing weights"] = _improve
    if job.train and recipe.offers("train"):
        found["fine-tuning"] = _train
    return found


def _improve(job: Job, config: Config, progress: _Progress, model: nn.Module) -> None:
    with progress.named(model):
        found = improve(model, progress.recipe.calibration_batches(), job.improve or _IMPROVE[0])
    progress.improvement = improved(found)
    progress.remarks.append(f"Weights chosen by {job.improve} steps: {'; '.join(found.conclusions)}.")
    progress.steps.note(str(found) if job.verbose else "\n".join(found.conclusions))
    progress.measure(model, config.name, f"{job.method}, then improved")


def _train(job: Job, config: Config, progress: _Progress, model: nn.Module) -> None:
    progress.recipe.train(model)
    progress.measure(model, config.name, f"{job.method}, then fine-tuned")


def _prepare_and_calibrate(job: Job, config: Config, progress: _Progress, model: nn.Module) -> None:
    """Calibrate a model with the chosen method; to compare methods, calibrate copies with the others, too."""
    example = job.example(config, model, progress.recipe)
    set_execution(prepare(model, config, example, target=None if example is None else job.target), job.execution)
    methods = [method for method in calibrators() if job.compare and method != job.method]
    copies = {method: copy.deepcopy(model) for method in methods} | {job.method: model}
    for method, own in copies.items():
        with progress.named(own):
            progress.calibrators[method] = calibrate(
                own, progress.recipe.calibration_batches(), method, unseen=job.unseen
            )
        progress.measure(own, config.name, method)
    progress.calibrators = {job.method: progress.calibrators.pop(job.method)} | progress.calibrators
    found = {row.method: row.value for row in progress.accuracy if row.method in copies}
    if found and (best := max(found, key=found.__getitem__)) != job.method and found[best] > found[job.method]:
        progress.steps.note(f"{best} was best, and {job.method} is exported; for the other: --method {best}")
