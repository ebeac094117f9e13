"""The figures that the project promises, measured in one run: `python -m benchmarks.bars`.

Prints a table, writes it to benchmarks/results/bars.json and into README.md, and exits with 1 if a bar is missed. Rows
of the demo are read from demo-output/results.json, which `make demo` writes; without that file they are left out.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

import fakequant as fq

from . import exactness, kernels

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "bars.json"
DEMO = ROOT / "demo-output" / "results.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- bars:begin -->", "<!-- bars:end -->"


@dataclass(frozen=True)
class Bar:
    """One promise: what is measured, what must hold, what was found."""

    what: str
    bar: str
    measured: str
    ok: bool


def at_most(what: str, value: float, limit: float, form: str = "{:.2f}") -> Bar:
    """A bar on the largest value allowed."""
    return Bar(what, f"<= {limit:g}", form.format(value), value <= limit)


def nothing_differs(what: str, count: int) -> Bar:
    """A bar of zero differing elements."""
    return Bar(what, "0 differing elements", f"{count:,}", count == 0)


def exactness_bars() -> list[Bar]:
    """Bitwise comparisons with the libraries whose arithmetic the package names."""
    forward_and_gradient = f"{exactness.ELEMENTS:,} values, forward and gradient"
    comparisons: list[tuple[str, Callable[[], int]]] = [
        ("`DIVIDE` against ONNX Runtime", exactness.divide_against_onnxruntime),
        ("`RECIPROCAL` against ATen per tensor", exactness.reciprocal_against_aten_per_tensor),
        ("`RECIPROCAL` against ATen per channel", exactness.reciprocal_against_aten_per_channel),
        ("`MULTIPLIER` against `clamp(rint(x*m))/m`", exactness.multiplier_against_its_formula),
    ]
    bars = [nothing_differs(f"{what}, {forward_and_gradient}", compare()) for what, compare in comparisons]
    what = "float8 formats over every float16 and bfloat16 pattern, against decoded codes"
    return [*bars, nothing_differs(what, exactness.float8_against_decoded_codes())]


def kernel_bars() -> list[Bar]:
    """The time of the forward kernel over that of a copy and of ATen."""
    case = kernels.INT8_CASE
    assert case.differing() == 0, f"{case.name} differs from the reference; its time means nothing"
    aten = case.aten()
    assert aten is not None
    what = f"int8 forward, {kernels.ELEMENTS:,} float32: time over"
    over_copy = kernels.ratio(case.run(), case.copy(), case.inputs())
    over_aten = kernels.ratio(case.run(), aten, case.inputs(), rounds=10)
    return [
        at_most(f"{what} `x.clone()`", over_copy.median, 1.5),
        at_most(f"{what} ATen", over_aten.median, 0.1, "{:.3f}"),
    ]


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
    """The time of `import fakequant` after `import torch`, and the optional packages that it loads."""
    code = (
        "import time, torch, numpy, sys; start = time.perf_counter(); import fakequant; "
        "print(time.perf_counter() - start, *sorted({'onnx', 'triton', 'matplotlib'} & set(sys.modules)))"
    )
    seconds, loaded = [], set()
    for _ in range(interpreters):
        first, *names = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.split()
        seconds.append(float(first))
        loaded |= set(names)
    middle = statistics.median(seconds)
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
    for name, model in found["models"].items():
        what = f"{name}.onnx in ONNX Runtime against torch, {model['elements']:,} elements of Q/DQ nodes"
        bar = nothing_differs(what, model["differing"])
        bars.append(Bar(bar.what, bar.bar, bar.measured, bar.ok and model["exact"]))
    return bars


@cache
def machine() -> dict[str, str]:
    """Where the figures come from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fakequant": fq.__version__,
        # Above 1, other programs ran too, and the times are theirs as much as ours.
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        "commit": commit.strip() + ("+changes" if changed.strip() else ""),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def as_table(bars: Sequence[Bar]) -> str:
    """The bars as a Markdown table."""
    rows = ["| what | bar | measured | |", "|---|---|---|---|"]
    return "\n".join(rows + [f"| {b.what} | {b.bar} | {b.measured} | {'ok' if b.ok else 'MISSED'} |" for b in bars])


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: an interrupted run leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def update_readme(bars: Sequence[Bar], readme: Path = README) -> None:
    """Put the table between the two markers of the README.

    Raises:
        ValueError: a marker is missing.
    """
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{readme} lacks the markers {BEGIN} and {END}; put them where the table belongs")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    where = machine()
    source = f"Measured by `make bars` on {where['processor']}, {where['threads']} threads, torch {where['torch']}."
    write_whole(readme, f"{before}{BEGIN}\n{as_table(bars)}\n\n{source}\n{END}{after}")


def main() -> int:
    """Measure, print and write everything; 1 if a bar is missed."""
    machine()
    bars = demo_bars()
    if not bars:
        print(f"{DEMO} is missing: run `make demo` for its rows")
    bars += exactness_bars()
    bars += kernel_bars()
    bars.append(at_most("bytes saved for the backward per element", saved_bytes_per_element(), 1 / 8, "{:.3f}"))
    bars += import_bars()
    print(as_table(bars))
    write_whole(RESULTS, json.dumps({"machine": machine(), "bars": [asdict(bar) for bar in bars]}, indent=2) + "\n")
    update_readme(bars)
    missed = [bar.what for bar in bars if not bar.ok]
    print(f"missed: {'; '.join(missed)}" if missed else "all bars are met")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
