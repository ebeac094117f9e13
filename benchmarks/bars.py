"""The figures that the project promises, measured in one run: `python -m benchmarks.bars`.

Prints a table, writes what it measured to benchmarks/results/bars.json, all rows to docs/notes/bars.md, and five of
them to README.md. Exits with 1 if a bar is missed. Some rows come from files of other commands: the demo's from
demo-output/results.json (`make demo`), the language model's from transformer-output/results.json (`python
examples/transformer.py`), other libraries' from benchmarks/results/bench.jsonl (`make bench`), and those of
`benchmarks/records.py`. Rows whose file is missing are left out, with a line that says so. Times are those of the cases
in `benchmarks/limits.py`, by the runner of `make bench`. `--pages` measures nothing. It writes the pages from the last
results and the records.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fakequant as fq
from benchmarks.harness import Result
from tests.support import compat_exactness, exactness

from . import compat, ir, pages
from .bar import Bar, at_most, nothing_differs
from .cases import COMPARED_SIZES
from .limits import LIMITS, Limit
from .processes import Plan, run
from .record import LINES, ROOT, Line, machine, put_between, read_lines, write_results
from .records import record_bars

RESULTS = ROOT / "benchmarks" / "results" / "bars.json"
DEMO = ROOT / "demo-output" / "results.json"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "notes" / "bars.md"
STUDY = ROOT / "transformer-output" / "results.json"
MICROSCALING = ROOT / "docs" / "notes" / "microscaling.md"
PROCESSES = 3
BEGIN, END = "<!-- bars:begin -->", "<!-- bars:end -->"
FIGURES_BEGIN, FIGURES_END = "<!-- figures:begin -->", "<!-- figures:end -->"
# What the README says of a row, by the beginning of the row's text.
FIGURES = {
    "int8 forward, 4,194,304 float32: time over `x.clone()`": "fake quantization of 4M floats to INT8: time / copy",
    "int8 forward, 4,194,304 float32: time over ATen": "the same: time / ATen's `fake_quantize`",
    "training step, INT8 weights and activations": "training step with INT8 weights and activations: time / float",
    "Linear, codes multiplied, forward": "`Linear` with integer products: time / float `F.linear`",
    "int8.onnx in ONNX Runtime against torch": "INT8 model in ONNX Runtime: quantized elements that differ from torch",
}
STUDY_BEGIN, STUDY_END = "<!-- study:begin -->", "<!-- study:end -->"


def exactness_bars() -> list[Bar]:
    """Bitwise comparisons with the libraries whose arithmetic the package names."""
    forward_and_gradient = f"{exactness.ELEMENTS:,} values, forward and gradient"
    comparisons: list[tuple[str, Callable[[], int]]] = [
        ("`DIVIDE` against ONNX Runtime", exactness.divide_against_onnxruntime),
        ("`RECIPROCAL` against ATen per tensor", exactness.reciprocal_against_aten_per_tensor),
        ("`RECIPROCAL` against ATen per channel", exactness.reciprocal_against_aten_per_channel),
        ("`MULTIPLIER` against `clamp(rint(x*m))/m`", exactness.multiplier_against_its_formula),
        ("`compat.aten` against torch, all dtypes, ranges and axes", compat_exactness.against_aten),
        ("`compat.aten`, learnable, against torch", compat_exactness.learnable_against_aten),
        ("`compat.onnxruntime` in ONNX Runtime, opsets 15 to 21", compat_exactness.against_onnxruntime),
    ]
    bars = [nothing_differs(f"{what}, {forward_and_gradient}", compare()) for what, compare in comparisons]
    what = "float8 formats over every float16 and bfloat16 pattern, against decoded codes"
    bars.append(nothing_differs(what, exactness.float8_against_decoded_codes()))
    what = "`compat.onnxruntime` against recorded FakeQuant and FakeQuantGrad kernels, values, mask and gradient"
    return [*bars, nothing_differs(what, compat_exactness.against_recorded_kernels())]


def pytorch_quantization_bars() -> list[Bar]:
    """`compat.pytorch_quantization` against the numbers and the rules of the original; the loops take 20 seconds."""
    guide = compat.guide()
    found = f"{guide.scale}; {guide.differing} of {len(compat.GUIDE_VALUES) + len(compat.GUIDE_CODES)} numbers differ"
    functions = (
        "`tensor_quant`, `fake_tensor_quant`, `legacy_fake_tensor_quant`, `fake_affine_tensor_quant`, `scaled_e4m3`"
    )
    bars = [
        Bar(
            "pytorch_quantization: the example of its guide",
            "scale 128.0057, no number differs",
            found,
            guide == compat.Guide(0, "128.0057"),
        ),
        nothing_differs(
            f"pytorch_quantization: {functions} against their formulas, 1,048,576 values a case, forward and gradient",
            compat.differing_from_formulas(),
        ),
        nothing_differs(
            "pytorch_quantization: amax by max, percentile, mse and entropy on fixed streams against its rules",
            compat.differing_amax(),
        ),
    ]
    for bins in (2048, 8192):
        search = compat.entropy(bins)
        what = f"pytorch_quantization: entropy search over the original's loops, {bins} bins"
        measured = f"{search.times:.0f} times, {'the same' if search.same else 'ANOTHER'} amax"
        bars.append(Bar(what, ">= 50 times, the same amax", measured, search.times >= 50 and search.same))
    runs = compat.script_runs()
    what = "pytorch_quantization: a script of its public names, unmodified, by `python -m fakequant.compat run`"
    return [*bars, Bar(what, "runs", "runs" if runs else "FAILS", runs)]


def limit_bars(results: Sequence[Result]) -> list[Bar]:
    """A bar for every promise about times: its slowest case, and its limit."""
    return [_limit_bar(limit, [result for result in results if limit.holds_for(result)]) for limit in LIMITS]


def _limit_bar(limit: Limit, own: Sequence[Result]) -> Bar:
    what = limit.what
    if len(own) < len(limit.cases):
        return Bar(what, f"<= {limit.most:g}", f"{len(limit.cases) - len(own)} not measured", False)
    for result in own:
        if result.ratio is None:
            return Bar(what, f"<= {limit.most:g}", f"{result.case}: {result.outcome}", False)
    worst, found = max(((result, result.ratio) for result in own), key=lambda pair: pair[1].p50)
    if len(own) > 1:
        what += f", slowest ({_apart(worst, own)})"
    digits = max(2, 2 - math.floor(math.log10(limit.most)))
    median, low, high = (f"{value:.{digits}f}" for value in (found.p50, found.p20, found.p80))
    return Bar(what, f"<= {limit.most:g}", f"{median} ({low} to {high})", found.p50 <= limit.most)


def _apart(worst: Result, own: Sequence[Result]) -> str:
    """A result by what sets it apart from the others."""
    names = ("case", "direction", "elements", "dtype")
    values = {name: getattr(worst, name) for name in names if len({getattr(one, name) for one in own}) > 1}
    return ", ".join(f"{value:,}" if isinstance(value, int) else value for value in values.values())


def peer_bars(path: Path = LINES) -> list[Bar]:
    """The nearest call of others at every size, from the file that `make bench` writes; nothing without that file."""
    if not path.exists():
        return []
    lines = pages.calls_of_others(read_lines(path))
    return [_peer_bar(elements, pages.found(lines, elements=elements)) for elements in COMPARED_SIZES]


def _peer_bar(elements: int, lines: Sequence[Line]) -> Bar:
    timed = [line for line in lines if line["p50"]]
    what = f"{len(timed)} calls of {', '.join(sorted({pages.peer_of(line) for line in timed})) or 'others'}"
    what += f", {elements:,} float32: time over ours"
    if not timed:
        return Bar(what, "> 1", "none is timed", False)
    nearest = max(timed, key=lambda line: line["p50"])
    times = 1 / nearest["p50"]
    what += f", nearest ({nearest['against']}, {nearest['case']}, {nearest['direction']})"
    return Bar(what, "> 1", f"{times:.2f}", times > 1)


def graph_bars() -> list[Bar]:
    """Captured graphs of four networks in three presets against the eager models, and what Inductor makes of two."""
    pairs = [(network, preset) for network in ir.NETWORKS for preset in ir.PRESETS]
    totals: dict[str, ir.Differing] = {}
    for network, preset in pairs:
        for what, found in ir.exact_differences(network, preset).items():
            totals[what] = totals.get(what, ir.Differing(0, 0)) + found
    where = "CNN, ResNet, LSTM, transformer in INT8, FP8, NVFP4"
    bars = [
        nothing_differs(f"graphs of {where}: {what}, {found.elements:,} elements", found.differing)
        for what, found in totals.items()
    ]
    steps = [ir.folded_steps(network, preset) for network, preset in pairs]
    share = sum(s.moved for s in steps) / sum(s.elements for s in steps)
    farthest = max(s.farthest for s in steps)
    what = f"the same after folding batch normalisation: share of {sum(s.elements for s in steps):,} codes that move"
    measured = f"{share:.4%}, at most {farthest} step{'s' * (farthest != 1)}"
    bars.append(Bar(what, "< 0.1 %, by at most 1 step", measured, share < 1e-3 and farthest <= 1))
    ratios = ir.inductor_ratios()
    what = f"training step, INT8, of the graph compiled by Inductor: time over the eager model ({'; '.join(ratios)})"
    return [*bars, Bar(what, "none, it rounds otherwise", "; ".join(f"{found:.2f}" for found in ratios.values()), True)]


def saved_bytes_per_element(elements: int = 1 << 20) -> float:
    """Bytes that autograd keeps for the backward of one fake quantization, per element."""
    kept: list[int] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.numel() * saved.element_size())
        return saved

    x = torch.randn(elements, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        fq.fake_quantize(x, "int8", scale=0.01)
    return sum(kept) / elements


def import_bars(interpreters: int = 9) -> list[Bar]:
    """The time of `import fakequant` after `import torch`, and the optional packages that it loads.

    Imports after the first one read bytecode. Where the environment keeps Python from writing it, compiling would be
    half of the time, so bytecode is written here.
    """
    code = (
        "import time, torch, numpy, sys; start = time.perf_counter(); import fakequant; "
        "print(time.perf_counter() - start, *sorted({'onnx', 'triton', 'matplotlib'} & set(sys.modules)))"
    )
    seconds, loaded = [], set()
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
        for _ in range(interpreters + 1):
            first, *names = subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
            ).stdout.split()
            seconds.append(float(first))
            loaded |= set(names)
    middle = statistics.median(seconds[1:])
    return [
        Bar("import of `fakequant` beyond torch", "< 0.1 s", f"{middle:.3f} s", middle < 0.1),
        Bar("onnx, triton, matplotlib imported by it", "none", ", ".join(sorted(loaded)) or "none", not loaded),
    ]


def demo_bars(path: Path = DEMO) -> list[Bar]:
    """What the demo measured, from the file that it writes; nothing without that file."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    percent = found["percent"]
    start, int8, int4 = percent["float32"], percent["int8_best"], percent["int4_finetuned"]
    bars = [
        Bar("digits, held-out: float32", ">= 98 %", f"{start:.2f} %", start >= 98),
        Bar("digits: INT8, best calibrator", "within 0.3 points", f"{int8:.2f} %", round(start - int8, 6) <= 0.3),
        Bar("digits: INT4 after fine-tuning", "within 1 point", f"{int4:.2f} %", round(start - int4, 6) <= 1.0),
    ]
    codes = found["by_codes"]
    otherwise, images = codes["differing"] - codes["ties"], codes["images"]
    what = "digits: predictions that differ between integer and simulated execution, without ties of logits"
    bars.append(Bar(what, "none", f"{otherwise} of {images}; {codes['ties']} ties", otherwise == 0))
    for name, model in found["models"].items():
        what = f"{name}.onnx in ONNX Runtime against torch, {model['elements']:,} elements of Q/DQ nodes"
        bar = nothing_differs(what, model["differing"])
        bars.append(Bar(bar.what, bar.bar, bar.measured, bar.ok and model["exact"]))
    return bars


def study_bars(path: Path = STUDY) -> list[Bar]:
    """What the study of the transformer measured, from the file that it writes; nothing without that file."""
    if not path.exists():
        return []
    found = _study(path)["nats_per_byte"]["formats"]["NVFP4"]
    recovered, of_control = found["recovered"], found["recovered_of_control"]
    measured = f"{recovered:.1%}; {of_control:.1%} against float32 trained on for as long"
    what = "transformer in NVFP4 W4A4: share of the lost nats per byte that fine-tuning wins back"
    # What more training wins by itself is no recovery; where it harms the float model, it is no excuse.
    return [Bar(what, "both >= 50 %", measured, min(recovered, of_control) >= 0.5)]


def study_table(path: Path = STUDY) -> str:
    """The result of the study as a Markdown table, with where it comes from."""
    found = _study(path)
    losses, where = found["nats_per_byte"], found["environment"]
    start, control = losses["float32"], losses["float32_trained_on"]
    rows = [
        "| | calibrated | lost | fine-tuned | still lost | recovered | against the control |",
        "|---|---|---|---|---|---|---|",
        f"| float32 | {start:.4f} | | {control:.4f} | {control - start:+.4f} | | |",
    ]
    for name, row in losses["formats"].items():
        before, after = row["calibrated"], row["finetuned"]
        lost, left = before - start, after - start
        won = f"{row['recovered']:.0%} | {row['recovered_of_control']:.0%}"
        rows.append(f"| {name} | {before:.4f} | {lost:+.4f} | {after:.4f} | {left:+.4f} | {won} |")
    source = (
        f"{found['bytes']['measured']:,} held-out bytes of Python {where['python']}; {found['features']} features, "
        f"{found['steps']} steps of training, {found['tuning_steps']} of fine-tuning; torch {where['torch']}, "
        f"{found['seconds']:.0f} seconds."
    )
    return "\n".join([*rows, "", source])


def _study(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if found["split"] != "held_out":
        raise ValueError(
            f"{path} was measured on the {found['split']} files, by which settings are chosen; "
            "run `python examples/transformer.py` without --on"
        )
    return found


def as_table(bars: Sequence[Bar]) -> str:
    """The bars as a Markdown table."""
    rows = ["| what | bar | measured | |", "|---|---|---|---|"]
    return "\n".join(rows + [f"| {b.what} | {b.bar} | {b.measured} | {'ok' if b.ok else 'MISSED'} |" for b in bars])


def figures_table(bars: Sequence[Bar]) -> str:
    """The rows of the README, each from one bar.

    Raises:
        ValueError: a row has no bar, because it was renamed or not measured.
    """
    rows = ["| | measured |", "|---|---|"]
    for start, words in FIGURES.items():
        found = [bar for bar in bars if bar.what.startswith(start)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} bars begin with {start!r}, and the README needs one; correct FIGURES")
        rows.append(f"| {words} | {found[0].measured} |")
    return "\n".join(rows)


def write_pages(bars: Sequence[Bar], where: dict[str, str], readme: Path = README, page: Path = PAGE) -> None:
    """Put all bars between the markers of their page, and five of them between those of the README.

    Raises:
        ValueError: a marker is missing, or a row of the README has no bar.
    """
    source = f"Measured by `make bars` on {where['processor']}, {where['threads']} threads, torch {where['torch']}."
    put_between(page, BEGIN, END, f"{as_table(bars)}\n\n{source}")
    put_between(readme, FIGURES_BEGIN, FIGURES_END, f"{figures_table(bars)}\n\n{source}")


def main() -> int:
    """Measure, print and write everything; 1 if a bar is missed. With `--pages`: only write what was measured."""
    if STUDY.exists():
        put_between(MICROSCALING, STUDY_BEGIN, STUDY_END, study_table())
    if "--pages" in sys.argv[1:]:
        measured = json.loads(RESULTS.read_text())
        write_pages([*(Bar(**bar) for bar in measured["bars"]), *record_bars()], measured["machine"])
        return 0
    if not DEMO.exists():
        raise SystemExit(f"{DEMO} is missing: run `make demo` first, whose figures are in the README")
    machine()  # before anything is timed: the load is then that of other programs
    results = run(Plan("promised", processes=PROCESSES))
    bars = demo_bars() + study_bars()
    if not STUDY.exists():
        print(f"{STUDY} is missing: run `python examples/transformer.py` for its row")
    bars += exactness_bars()
    bars += pytorch_quantization_bars()
    bars += limit_bars(results)
    bars += graph_bars()
    bars += peer_bars()
    bars.append(at_most("bytes saved for the backward per element", saved_bytes_per_element(), 1 / 8, "{:.3f}"))
    bars += import_bars()
    write_results(RESULTS, {"machine": machine(), "bars": [asdict(bar) for bar in bars]})
    bars += record_bars()  # which stay in their own files
    print(as_table(bars))
    write_pages(bars, machine())
    missed = [bar.what for bar in bars if not bar.ok]
    print(f"missed: {'; '.join(missed)}" if missed else "all bars are met")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
