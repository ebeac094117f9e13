"""Count the mistakes of tests/test_misuse*.py that get one clear message: `python -m benchmarks.misuses`.

Runs these files and writes benchmarks/results/misuses.json.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from .record import ROOT, machine, write_results

RESULTS = ROOT / "benchmarks" / "results" / "misuses.json"
TESTS = ["tests/test_misuse.py", "tests/test_misuse_ptq.py", "tests/test_misuse_work.py"]


def counted(report: Path) -> dict[str, int]:
    """How many mistakes a report of pytest (JUnit XML) holds, and how many of them passed: the cases with a name."""
    cases = [case for case in ElementTree.parse(report).iter("testcase") if "[" in case.get("name", "")]
    return {"tried": len(cases), "clear": sum(len(case) == 0 for case in cases)}


def main() -> None:
    """Run the tests, print and record what they found."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, check=False)
        found = counted(report)
    print(f"{found['clear']} of {found['tried']} mistakes get one clear message")
    write_results(RESULTS, {"machine": machine(), **found})


if __name__ == "__main__":
    main()
