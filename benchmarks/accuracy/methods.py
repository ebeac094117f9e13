"""Write docs/notes/calibration-measured.md: what each method of calibration costs trained models.

python -m benchmarks.accuracy.methods
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import fakequant as fq
from benchmarks.accuracy.models import classifiers, output_error, tasks
from fakequant.calibration import DEFAULT_METHOD, calibrators

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "methods.json"
PAGE = ROOT / "docs" / "notes" / "calibration-measured.md"
PRESETS = ("INT8", "INT8_AFFINE", "FP8", "INT4")

_HEAD = """# What each method of calibration costs, measured

Written by `python -m benchmarks.accuracy.methods`. Four trained models are those of
[what accuracy algorithms win back](accuracy-measured.md); a perceptron with normalisations, an LSTM over the rows of
images, and a CNN with SiLU and gates are trained on the same digits. Inputs have one range per tensor, and every method
gets the same 8 batches. A figure is the squared error of the model's output on other data, divided by the error of the
best single method. The last row is the mean over the models. `{default}` is the default.
"""


def measure() -> list[dict[str, str | float]]:
    """The rows: model, preset, method and error."""
    rows = []
    folder = ROOT / "build" / "accuracy"
    for task in (tasks(folder) | classifiers(folder)).values():
        for preset in PRESETS:
            for method in calibrators():
                model = fq.prepare(copy.deepcopy(task.model), preset)
                fq.calibrate(model, task.batches, method, progress=False)
                error = output_error(model, task.model, task.held_out)
                rows.append({"model": task.name, "preset": preset, "method": method, "error": error})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def page(rows: list[dict[str, str | float]]) -> str:
    """The page of the rows of a run."""
    text = _HEAD.format(default=DEFAULT_METHOD)
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    for preset in PRESETS:
        text += f"\n## {preset}\n\n| | {' | '.join(methods)} |\n|---|{'---|' * len(methods)}\n"
        shares: dict[str, list[float]] = {method: [] for method in methods}
        for name in dict.fromkeys(row["model"] for row in rows):
            errors = {r["method"]: float(r["error"]) for r in rows if (r["model"], r["preset"]) == (name, preset)}
            best = min(errors.values())
            for method in methods:
                shares[method].append(errors[method] / best)
            text += f"| {name} | {' | '.join(f'{shares[method][-1]:.2f}' for method in methods)} |\n"
        means = [sum(shares[method]) / len(shares[method]) for method in methods]
        text += f"| mean | {' | '.join(f'{mean:.3f}' for mean in means)} |\n"
    return text


def main() -> None:
    """Measure, and write the figures and the page."""
    warnings.simplefilter("ignore")
    rows = measure()
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
