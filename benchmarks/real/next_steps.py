"""Whether the next step of a report, when taken, ever makes a model worse: `python -m benchmarks.real.next_steps`.

Forty reports, of eight trained models by five presets. The code of each is executed as it is printed, and the error of
the output is measured on inputs that neither the report nor the step has seen. Ends with 1 if one is worse.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from benchmarks.real.__main__ import Row, advised, outputs, quantized
from benchmarks.real.advising import OWN, trained

PRESETS = ("int8", "int8_affine", "int4_group32", "int4", "mxfp4")
ALIKE = 0.04
"""The loss in dB, a hundredth of the error, that a step which makes the model smaller may cost."""


def is_worse(row: Row) -> bool:
    """Whether a step made the model worse, by the dB before and after it."""
    return row["after"] < row["before"] - ALIKE


def main() -> int:
    """Run and print; 1 if a step makes a model worse."""
    reports = steps = worse = 0
    for name, task in trained(__doc__, [*OWN, "CREPE tiny"]):
        with torch.no_grad():
            exact = outputs(task.model, task.held)
        for preset in PRESETS:
            row = Row()
            model = quantized(task, preset, row)
            with tempfile.TemporaryDirectory() as folder:
                advised(model, task, exact, Path(folder), row)
            reports, steps, worse = reports + 1, steps + (row["after"] != row["before"]), worse + is_worse(row)
            print(json.dumps({"model": name, "preset": preset, **row}), flush=True)
    print(f"{worse} of {reports} next steps made the model worse; {steps} changed its error")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
