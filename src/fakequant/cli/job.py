"""Run a recipe: calibrate and fine-tune its float model, export and verify an ONNX file, write a report.

After every step, a job writes a page, and a checkpoint from which the same command goes on after an interruption.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fakequant.calibration import DEFAULT_METHOD, Calibrator, calibrators, find_method
from fakequant.cli.console import Steps, failures_named
from fakequant.cli.recipe import Recipe, load_recipe
from fakequant.cli.results import CHECKPOINT, GRAPH, ONNX, PARTS, REPORT, publish, results_folder, staged
from fakequant.data.batches import Batches, run_batch
from fakequant.data.digest import NoDigestError, digest
from fakequant.errors import ConfigError, ExportError, FakeQuantError, VerificationError, first_line, nearest
from fakequant.export import ExportReport, VerifyReport, export_onnx, verify_onnx
from fakequant.export.capability import Style
from fakequant.files import read_whole, remove_abandoned, writable_file, write_whole
from fakequant.ir import capture, to_text
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.engine import executed_by, find_engine, set_execution
from fakequant.model.observation import check_unseen
from fakequant.model.prepare import prepare, with_exceptions
from fakequant.model.presets import find_preset
from fakequant.model.state.checkpoint import load, remove_checkpoint, save
from fakequant.model.state.plan import value_of
from fakequant.model.summary import summary
from fakequant.model.weights import evaluating
from fakequant.nn import Execution, cached_weights
from fakequant.nn.integer import as_execution
from fakequant.ptq import improve
from fakequant.ptq.collector import run_of
from fakequant.ptq.judging import LayerResult
from fakequant.ptq.next_step import AdviceContext
from fakequant.ptq.trial import Preparation, places
from fakequant.report import (
    RESULTS,
    Accuracy,
    ReportData,
    Section,
    advised,
    environment,
    layers_left,
    measure,
    read_results,
    sizes,
    with_ranges,
    write_report,
    write_results,
)
from fakequant.report.terminal import print_report
from fakequant.text import listed


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

    Axis 0 of a tensor is the batch axis if it is as long as axis 0 of the first tensor. The batch axis is unclear for
    an example with one sample, because torch.export treats a length of 1 as a constant.

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
    """Yield the batches with the shapes of the example; if the batch size is dynamic, it may differ.

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


def write_graph(model: nn.Module, example: Any, path: Path) -> list[str]:
    """Write a model's graph as text; returns a line for the report."""
    try:
        with evaluating(model):
            graph = capture(model, example)
    except Exception as error:  # of torch.export, which meets every model of a user
        return [f"The graph is missing, because the model could not be captured: {first_line(error)}"]
    write_whole(path, to_text(graph).encode())
    return [f"{path.name} lists every operation of the graph; Netron shows the graph of {ONNX}."]


@dataclass(frozen=True)
class Job:
    """The arguments of `fakequant quantize`, see its help."""

    recipe: str | Path
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
    text: Path | None = None
    overwrite: bool = False
    floats: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    packed: bool = False
    trust: bool = False
    task: str = "auto"
    target: str | None = None

    def settings(self, recipe: Recipe, model: nn.Module, batches: Iterable[Any]) -> str:
        """A text that is equal for two calls only if they make the same model; "" if batches cannot be compared.

        The text holds digests of the float model's weights, and of its output for the first batch.
        """
        names = (self.preset.lower(), self.method, self.train, self.compare, self.execution, self.unseen, self.improve)
        found: list[Any] = [*names, self.floats, self.rules, str(self.text), recipe.content, self.target]
        with torch.random.fork_rng([]):
            torch.manual_seed(0)  # a data loader that shuffles gives the same batches at the next call
            try:
                for number, batch in enumerate(batches):
                    found += [digest(batch)] if number else run_of(model, Batches([batch], "quantize").kept()).items()
            except NoDigestError:
                return ""
        return repr(found)

    def command(self, *, float: str | None = None, rule: str | None = None, folds: bool = False, **changed: Any) -> str:
        """The command line of this job, with changed settings."""
        floats, rules = (*self.floats, *filter(None, [float])), (*self.rules, *filter(None, [rule]))
        job = replace(self, floats=floats, rules=rules, **changed)
        words = ["fakequant", "quantize", str(job.recipe), "--out", str(job.out)]
        usual = {field.name: field.default for field in fields(Job)} | {"preset": "int8", "method": DEFAULT_METHOD}
        for name in ("preset", "method", "style", "execution", "unseen", "improve", "text", "task", "target"):
            if (value := getattr(job, name)) != usual[name]:
                words += [f"--{name}", str(value)]
        words += [] if job.train else ["--no-train"]
        flags = {"compare": job.compare, "static": job.static, "packed": job.packed, "trust-remote-code": job.trust}
        words += [f"--{name}" for name, isset in flags.items() if isset]
        for name, values in (("float", floats), ("rule", rules)):
            words += [word for value in values for word in (f"--{name}", value)]
        head = f"# in {job.recipe}: let model() return fq.fuse_batch_norm(net)\n" if folds else ""
        return head + shlex.join(words)

    def config(self) -> Config:
        """The preset with the rules and the layers in float; raises ConfigError if a rule is not PATTERN=PRESET."""
        rules: dict[str, str] = {}
        for rule in self.rules:
            pattern, equals, preset = rule.rpartition("=")
            if not equals:
                raise ConfigError(f"--rule takes PATTERN=PRESET, such as --rule head=int8, got {rule!r}")
            rules[pattern] = preset
        config = with_exceptions(find_preset(self.preset), self.floats, rules)
        number = len(self.floats) + len(rules)
        ending = f" with {number} exception{'s' if number > 1 else ''}" if number else ""
        return replace(config, name=config.name + ending)

    def example(self, config: Config, model: nn.Module, recipe: Recipe) -> Any:
        """The example with which the target's engine places quantizers; None if the engine places no quantizers."""
        placed = places(self.target) and self.target_for(config) is not None
        return example_of(model, recipe.first_batch()) if placed else None

    @property
    def executor(self) -> str | None:
        """The engine that measurements simulate: the target; None without it, or if layers multiply integers."""
        return self.target if as_execution(self.execution) is Execution.SIMULATE else None

    def target_for(self, config: Config) -> str | None:
        """The target that `prepare` gets for a configuration, see `Preparation.target_for`."""
        return Preparation(target=self.target).target_for(config)

    def unknown_gain(self) -> str:
        """A sentence that names the presets that are not known to gain in the target engine; "" if there are none."""
        presets = [self.preset, *(rule.rpartition("=")[2] for rule in self.rules)]
        names = dict.fromkeys(find_preset(name).name for name in presets)
        return "" if self.target is None else find_engine(self.target).unknown_gain(names)

    def exceptions(self) -> list[str]:
        """Lines for the report that name the layers in float, and those with other presets."""
        left = [f"In float: {', '.join(self.floats)}."] if self.floats else []
        return [*left, f"Other presets: {', '.join(self.rules)}."] if self.rules else left

    def label(self, name: str) -> str:
        """The name of a file or folder of the run in the report."""
        holds = "packed codes" if self.packed else "float weights, for training on"
        return f"{name} ({holds})" if name == CHECKPOINT else name


_FOLDER = "unfinished"
_STATE = ".fakequant-job.json"
"""The name of the file with the state, which shows that this command made the folder."""


def folder_in(out: Path) -> Path:
    """The folder `unfinished` in the folder of the results; a number follows if another program made `unfinished`."""
    names = chain([_FOLDER], (f"{_FOLDER}-{number}" for number in count(2)))
    folders = (out / name for name in names)
    return next(one for one in folders if (one / _STATE).is_file() or not os.path.lexists(one))


class Unfinished:
    """The folder `unfinished` in the folder of the results, see `folder_in`."""

    def __init__(self, out: Path, source: str) -> None:
        self.folder, self.source, self.settings = folder_in(out), source, ""
        self.done: list[str] = []
        self.accuracy: list[Accuracy] = []
        self.improvement: list[LayerResult] = []

    @property
    def has_state(self) -> bool:
        """Whether an earlier call left a state to go on from."""
        return (self.folder / _STATE).is_file()

    def resume(self, model: nn.Module, settings: str) -> nn.Module | None:
        """The model that an earlier call with the same `settings` stored; None if there is none or it is unreadable."""
        self.settings = settings and hashlib.sha256(settings.encode("utf-8", "backslashreplace")).hexdigest()
        try:
            state = json.loads(read_whole(self.folder / _STATE))
            if not settings or state["settings"] != self.settings:
                return None
            accuracy = value_of(state["accuracy"], "accuracy", Sequence[Accuracy])
            improvement = value_of(state["improvement"], "improvement", Sequence[LayerResult])
            loaded = load(model, self.folder / CHECKPOINT)
            self.done = [str(step) for step in state["done"]]
        except (FakeQuantError, OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        self.accuracy, self.improvement = accuracy, improvement
        return loaded

    def keep(
        self, step: str, model: nn.Module, accuracy: Sequence[Accuracy], improvement: Sequence[LayerResult]
    ) -> None:
        """Store the model after a step; the state is written last, so that it never names a missing checkpoint."""
        self.done.append(step)
        self._write({"source": self.source})
        save(model, self.folder / CHECKPOINT)
        state = {
            "source": self.source,
            "settings": self.settings,
            "done": self.done,
            "accuracy": [asdict(row) for row in accuracy],
            "improvement": [asdict(row) for row in improvement],
        }
        self._write(state)

    def _write(self, state: dict[str, Any]) -> None:
        write_whole(writable_file(self.folder / _STATE), json.dumps(state).encode())

    def remove(self) -> None:
        """Remove the files of this command, once the results are in their place, or if the job starts anew."""
        if not self.has_state:
            return
        remove_checkpoint(self.folder / CHECKPOINT)
        with suppress(OSError):
            remove_abandoned(self.folder)
            for name in (REPORT, _STATE):
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()


def held_before(out: Path, source: str, title: str) -> str:
    """A line that says what a folder held before this run; "" if it was empty, or held results of the same job."""
    ours = {Path(part).parts[0] for part in PARTS}
    names = sorted(path.name for path in out.iterdir() if path != folder_in(out) and not path.name.startswith("."))
    if (out / RESULTS).is_file():
        with suppress(FakeQuantError, OSError):
            found = read_results(out)
            if (found.title, found.source) == (title, source):
                return ""
            recipe, _, preset = found.title.rpartition(", quantized to ")
            return f"{out} holds the {preset} run of {found.source or recipe}; this run replaces it"
    replaced = [name for name in names if name in ours]
    others = [name for name in names if name not in ours]
    if replaced:
        return f"{out} holds {listed(replaced, 3)} of another origin; this run replaces files of these names"
    return f"{out} holds {listed(others, 3)}; this run keeps these and adds its files" if others else ""


def refuse_other_recipe(out: Path, source: str) -> None:
    """Raise ConfigError if a folder holds the results, or an unfinished run, of another recipe."""
    found = ""
    with suppress(FakeQuantError, OSError):
        found = read_results(out).source if (out / RESULTS).is_file() else ""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = found or json.loads(read_whole(folder_in(out) / _STATE))["source"]
    if found and found != source:
        raise ConfigError(
            f"{out} holds the results of another recipe, {found}; give another folder by --out, or --overwrite to "
            "replace them"
        )


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
    improvement: list[LayerResult] = field(default_factory=list)
    missing: dict[Section, str] = field(default_factory=dict)

    def measure(self, model: nn.Module, format: str, method: str) -> None:
        """Add the metric of a model, if the recipe defines one."""
        if not self.recipe.offers("evaluate"):
            return
        with executed_by(model, self.job.executor), evaluating(model), cached_weights(model), torch.no_grad():
            value = self.recipe.evaluate(model)
        task = self.recipe.task
        self.accuracy.append(Accuracy(format, method, value, negated=task.smaller))
        self.steps.note(f"{format} {method}: {-value if task.smaller else value:.6g}")

    def page(self, config: Config, state: str) -> None:
        """Write the page of the steps so far."""
        write_report(self.kept.folder / REPORT, replace(self.data(config), unfinished=f"{state}."))

    def data(self, config: Config) -> ReportData:
        """The content of the report after the steps so far."""
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
        """A context that names the batch in an error of a model, unless the user wants the traceback."""
        return failures_named(model, self.job.verbose)


def run(job: Job, console: Console) -> ReportData:
    """Run a job and return the content of its report.

    The files of an earlier job are replaced when all new files are written. If a step fails, the old files are
    unchanged; `unfinished` in their folder then holds a page of the steps so far, and the same job goes on after them.

    Raises:
        ConfigError: an unknown preset, method or execution; or the execution is "integer", which a layer does not
            support; or the folder holds the results of another recipe.
        ExportError: an unknown style; or ONNX cannot express the model: then checkpoint and report are written anyway.
        OutputError: the folder cannot be written, or another process writes to it; raised before any work.
        RecipeError: the recipe lacks a function; raised before any work.
        VerificationError: the exported file does not compute the same as the model, or without a target and for ONNX
            Runtime, its default session loses accuracy on this processor; all files are written.
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
            optional = (recipe.offers("evaluate"), job.improve is not None, job.train and recipe.offers("train"))
            progress = _Progress(recipe, job, Steps(console, 6 + sum(optional)), kept)
            if before := held_before(out, recipe.source, title_of(recipe.path, config)):
                progress.steps.note(before)
            if gain and job.target_for(config) is None:  # else `prepare` says it
                progress.steps.note(gain)
            model = quantized_model(job, config, progress)
            with staged(out) as folder:
                data, names, refusal = _write(job, config, progress, model, folder)
                state = f"{out / RESULTS} says whether the files beside it are of one run"
                publish(folder, out)
            kept.remove()
    except KeyboardInterrupt:
        if kept is not None and (kept.folder / REPORT).is_file():
            goes_on = ", and the same command goes on from there" if kept.settings else ""
            state += f"; {kept.folder / REPORT} shows what was done{goes_on}"
        raise KeyboardInterrupt(f"interrupted: {state}") from None
    progress.steps.note(f"Written: {', '.join(str(out / name) for name in names)}")
    if refusal is not None:
        raise refusal
    for check in data.verifications:
        if not check.exact:
            raise VerificationError(f"{out / ONNX} does not compute the same as the model; see {out / REPORT}")
        # Other engines run the file without ONNX Runtime's default session.
        if not check.passed and (job.target is None or "onnxruntime" in find_engine(job.target).packages):
            cure = f"run it with {check.restored_by}" if check.restored_by else f"see {out / REPORT}"
            raise VerificationError(f"{out / ONNX} is exact, but ONNX Runtime's default session loses accuracy; {cure}")
    return data


def title_of(recipe: Path, config: Config) -> str:
    """The title of a run's report."""
    return f"{recipe.stem}, quantized to {config.name}"


def _write(
    job: Job, config: Config, progress: _Progress, model: nn.Module, folder: Path
) -> tuple[ReportData, list[str], ExportError | None]:
    """Save, export, verify and report a model; return the report, the names of all files, and the export's error."""
    recipe, steps, example = progress.recipe, progress.steps, example_of(model, progress.recipe.first_batch())
    with steps.step("saving the checkpoint"):
        save(model, folder / CHECKPOINT, packed=job.packed)
    export, check, refusal = _exported(job, progress, model, example, folder / ONNX)
    progress.page(config, "the file is exported and verified, and the layers are not measured")
    with steps.step("measuring layers"), progress.named(model), executed_by(model, job.executor) as device:
        measured = measure(model, recipe.calibration_batches())
    with steps.step("writing the report"):
        lines = [] if device is None else [f"Measured by the arithmetic of {device.name}."]
        if as_execution(job.execution) is not Execution.SIMULATE:
            layers = summary(model).layers
            integer = sum(layer.execution == "integer" for layer in layers)
            lines.append(f"Measured with integer execution in {integer} of {len(layers)} layers.")
            lines += [f"{layer.name} is simulated: {layer.why_simulated}." for layer in layers if layer.why_simulated]
        lines += write_graph(model, example, folder / GRAPH)
        files = [CHECKPOINT] if export is None else [CHECKPOINT, ONNX]
        try:
            left = layers_left({config.name: model}, example)
        except Exception as error:  # of torch.export, which meets every model of a user
            left, progress.missing[Section.LEFT] = {}, f"torch cannot trace the model: {first_line(error)}"
        so_far = progress.data(config)
        data = replace(
            so_far,
            summary=(*so_far.summary, *lines),
            layers=measured.layers,
            alone_on=measured.alone_on,
            distributions=with_ranges(measured.distributions, progress.calibrators),
            channels=measured.channels,
            sizes=sizes(
                {job.label(name): folder / name for name in files}, {} if export is None else {ONNX: export.float_bytes}
            ),
            unquantized=left,
            verifications=[] if check is None else [check],
        )
        known = AdviceContext(command=job.command, target=job.target)
        with executed_by(model, job.executor):
            data = advised(model, data, measured, recipe.metric, known=known)
        write_report(folder / REPORT, data)
        write_results(folder / RESULTS, data)
    print_report(steps.console, data)
    return data, [*files, REPORT, RESULTS], refusal


def _exported(
    job: Job, progress: _Progress, model: nn.Module, example: Any, path: Path
) -> tuple[ExportReport | None, VerifyReport | None, ExportError | None]:
    """Export and verify a model; an error of the export is returned, and torch's errors are shortened to one line."""
    export: ExportReport | None = None
    try:
        dynamic_shapes = None if job.static else dynamic_batch(example)
        with progress.steps.step("exporting to ONNX"):
            try:
                export = export_onnx(model, example, path, dynamic_shapes=dynamic_shapes, style=job.style)
            except FakeQuantError:
                raise
            except Exception as error:  # torch.export raises errors of many kinds
                if job.verbose:
                    raise
                fixed = "; --static exports one batch size, for which a model that fixes it can be traced"
                cure = f"{'' if job.static else fixed} (-v shows the traceback)"
                raise ExportError(f"torch cannot trace the model: {first_line(error)}{cure}") from error
        with progress.steps.step("verifying bit for bit"):
            batches = fitting(progress.recipe.calibration_batches(), example, dynamic_shapes)
            return export, verify_onnx(path, model, batches), None
    except ExportError as error:
        progress.steps.begun += export is None  # the verification that does not happen
        progress.missing[Section.VERIFICATION] = f"The model was not exported: {error}"
        return export, None, error


def quantized_model(job: Job, config: Config, progress: _Progress) -> nn.Module:
    """Prepare, calibrate, improve and fine-tune the recipe's model; after every step it is measured and stored."""
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
            f"Starts anew: {kept.folder} is of other weights, batches or options. If model() draws random weights, "
            "call torch.manual_seed(0) in it, so that they are the same each time."
        )
    if recipe.offers("evaluate"):
        with steps.step("measuring float32", done=resumed is not None) as wanted:
            if wanted:
                progress.measure(model, "float32", "")
    else:
        why = f"{recipe.path.name} does not define evaluate(model): give a function, larger is better."
        progress.missing[Section.ACCURACY] = recipe.task.why_not or why
    optional = (job.improve is not None, "choosing weights"), (job.train and recipe.offers("train"), "fine-tuning")
    for name in ("calibrating", *(name for is_wanted, name in optional if is_wanted)):
        with steps.step(name, done=name in kept.done) as wanted:
            if not wanted:
                continue
            if name == "calibrating":
                # To compare methods, copies are calibrated with the others.
                example = job.example(config, model, recipe)
                set_execution(prepare(model, config, example, target=job.target_for(config)), job.execution)
                methods = [method for method in calibrators() if job.compare and method != job.method]
                copies = {method: copy.deepcopy(model) for method in methods} | {job.method: model}
                for method, own in copies.items():
                    with progress.named(own):
                        progress.calibrators[method] = calibrate(
                            own, recipe.calibration_batches(), method, unseen=job.unseen
                        )
                    progress.measure(own, config.name, method)
                progress.calibrators = {job.method: progress.calibrators.pop(job.method)} | progress.calibrators
                found = {row.method: row.value for row in progress.accuracy if row.method in copies}
                best = max(found, key=found.__getitem__, default=job.method)
                if best != job.method and found[best] > found[job.method]:
                    steps.note(f"{best} was best, and {job.method} is exported; for the other: --method {best}")
            elif name == "fine-tuning":
                recipe.train(model)
                progress.measure(model, config.name, f"{job.method}, then fine-tuned")
            else:
                with progress.named(model):
                    found = improve(model, recipe.calibration_batches(), job.improve or _IMPROVE[0])
                progress.improvement = found.layers
                progress.remarks.append(f"Weights chosen by {job.improve} steps: {'; '.join(found.conclusions)}.")
                steps.note(str(found) if job.verbose else "\n".join(found.conclusions))
                progress.measure(model, config.name, f"{job.method}, then improved")
            kept.keep(name, model, progress.accuracy, progress.improvement)
            progress.page(config, f"{name} is done, and the file is not exported")
    return model.eval()
