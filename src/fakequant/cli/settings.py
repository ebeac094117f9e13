"""The arguments of `fakequant quantize`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fakequant.calibration import DEFAULT_METHOD
from fakequant.cli.examples import example_of
from fakequant.cli.recipe import Recipe
from fakequant.cli.results import CHECKPOINT
from fakequant.data.batches import Batches
from fakequant.data.digest import NoDigestError, digest
from fakequant.errors import ConfigError
from fakequant.model.config import Config
from fakequant.model.prepare import with_exceptions
from fakequant.model.presets import find_preset
from fakequant.ptq.advising.next_step import places, unknown_gain
from fakequant.ptq.improving.collector import run_of


@dataclass(frozen=True)
class Job:
    """The arguments of `fakequant quantize`.

    Args:
        recipe: what `load_recipe` takes.
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
        text: lines of text for calibration, for a folder of Hugging Face.
        overwrite: whether to replace the results of another recipe, and to start anew.
        floats: patterns of layers that stay in float, as `skip` of `fakequant.prepare`.
        rules: "PATTERN=PRESET" for layers with another preset, as `rules` of `fakequant.prepare`.
        trust: whether Python files of a folder of Hugging Face may run.
        task: what is measured of the model of such a folder, see `fakequant.cli.huggingface.tasks.task_of`.
        target: the engine that will run the model; where it says so by a table, it places the quantizers of inputs with
            fixed ranges, see `fakequant.prepare`.
        packed: whether the checkpoint holds the codes of quantized weights instead of float weights.
    """

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
        """All that decides the quantized model, as text; "" where batches cannot be compared.

        Args:
            recipe: with the text of its files.
            model: in float, as the recipe gives it: its weights, and its output for the first batch.
            batches: for calibration; each is read and let go.
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
        """The command of this job, with other settings.

        Args:
            float: one more pattern of layers in float.
            rule: one more "PATTERN=PRESET".
            folds: whether the recipe is to fold batch normalisations first.
            changed: other preset=, method= or improve=.
        """
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
        """The preset with the exceptions from it.

        Raises:
            ConfigError: an unknown preset, or a rule that is no "PATTERN=PRESET".
        """
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
        """The example by which the target places quantizers; None where it does not."""
        static = any(rule.input is not None and not rule.input.dynamic for rule in config.rules)
        return example_of(model, recipe.first_batch()) if static and places(self.target) else None

    def unknown_gain(self) -> str:
        """A sentence where the target is not known to run a preset of the job.

        Raises:
            ConfigError: an unknown target.
        """
        presets = [self.preset, *(rule.rpartition("=")[2] for rule in self.rules)]
        return unknown_gain(self.target, dict.fromkeys(find_preset(name).name for name in presets))

    def exceptions(self) -> list[str]:
        """Lines for the report: which layers the preset does not hold for."""
        left = [f"In float: {', '.join(self.floats)}."] if self.floats else []
        return [*left, f"Other presets: {', '.join(self.rules)}."] if self.rules else left

    def label(self, name: str) -> str:
        """What the report calls a file or folder of the run."""
        holds = "packed codes" if self.packed else "float weights, for training on"
        return f"{name} ({holds})" if name == CHECKPOINT else name
