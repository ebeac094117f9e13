"""The code that makes a quantized model in one way, to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fakequant.calibration import DEFAULT_METHOD
from fakequant.data.batches import Forward, Inputs
from fakequant.data.token_mask import Mask
from fakequant.ptq.formats.comparison import Way
from fakequant.ptq.formats.task import Preparation, has_static_inputs

EVERY = 2
"""The second of every two batches judges. People give few batches: with fewer judges, chance would choose."""


@dataclass(frozen=True)
class Code:
    """How models of a search are made.

    Args:
        preparation: what `prepare` gets.
        held: the numbers of the batches that judge; none if a single batch does both.
        count: of all batches.
        inputs, forward, mask: as for `calibrate`.
    """

    preparation: Preparation
    held: Sequence[int]
    count: int
    inputs: Inputs | None = None
    forward: Forward | None = None
    mask: Mask | None = None

    def of(self, way: Way) -> str:
        """The code for one way; `model` and `batches` are as they were given, and both stay as they are.

        >>> print(Code(Preparation(), [1, 3], 4).of(Way("INT4_GROUP32", "mse", "fast")))
        import copy
        import fakequant as fq
        <BLANKLINE>
        made = [batch for number, batch in enumerate(batches) if number % 2 != 1]  # the others judged
        quantized = copy.deepcopy(model).eval()
        fq.prepare(quantized, "int4_group32")
        fq.calibrate(quantized, made, unseen="float")
        fq.ptq.improve(quantized, made, "fast")
        """
        own, lines = self.preparation, ["import copy", "import fakequant as fq", "", self._made()]
        lines.append("quantized = copy.deepcopy(model).eval()")
        example, part = self._example(), "" if own.inputs is None else f", inputs={_shown(own.inputs, 'inputs')}"
        if own.folds:
            lines.append(f"fq.fuse_batch_norm(quantized, {example}{part})")
        given = f", {example}{part}" if example else ""
        target = f', target="{own.target}"' if own.target and has_static_inputs(way.preset) else ""
        lines.append(f'fq.prepare(quantized, "{way.preset.lower()}"{given}{target})')
        how = {"inputs": self.inputs, "forward": self.forward, "mask": self.mask}
        rest = "".join(f", {name}={_shown(value, name)}" for name, value in how.items() if value is not None)
        method = "" if way.method == DEFAULT_METHOD else f', "{way.method}"'
        lines.append(f'fq.calibrate(quantized, made{method}{rest}, unseen="float")')
        if way.steps:
            lines.append(f'fq.ptq.improve(quantized, made, "{way.steps}"{rest})')
        return "\n".join(lines)

    def _made(self) -> str:
        if not self.held:
            return "made = [*batches]"
        last = f" or number > {self.held[-1]}" if self.held[-1] + EVERY < self.count else ""
        rule = f"number % {EVERY} != 1{last}"
        return f"made = [batch for number, batch in enumerate(batches) if {rule}]  # the others judged"

    def _example(self) -> str:
        example = self.preparation.example
        if example is None:
            return ""
        return f"made[0][:{len(example)}]" if self.inputs is None and isinstance(example, (tuple, list)) else "made[0]"


def _shown(value: Any, name: str) -> str:
    """A value in code; a function has the name of its argument."""
    return repr(value) if isinstance(value, (int, str, slice)) else name
