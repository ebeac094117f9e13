"""What a release needs beside the tests: metadata that is set, and packages that work in empty environments.

    python tests/native/release.py metadata           # refuses placeholders
    python tests/native/release.py try dist/*         # installs each wheel and each source archive in an environment

An environment gets the package with its extra `all`, runs the example of the README and `fakequant doctor`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNSET = "example.invalid"


def unset() -> list[str]:
    """The lines of pyproject.toml that hold placeholders, and versions that are not one."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    found = [f"pyproject.toml:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if UNSET in line]
    version = next(line.split('"')[1] for line in lines if line.startswith("version = "))
    if f'"{version}"' not in (ROOT / "src/fakequant/version.py").read_text():
        found.append(f"src/fakequant/version.py: not {version}")
    if f"## [{version}] - 2" not in (ROOT / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md: no date for {version}")
    return found


def works(package: Path) -> bool:
    """Whether a package installs in an empty environment, and the example of the README runs there."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "env" / "bin" / "python"
        steps = (
            [sys.executable, "-m", "venv", Path(folder) / "env"],
            [
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--constraint",
                ROOT / "constraints.txt",
                "setuptools",
                "wheel",
            ],
            # A source archive compiles the kernels against this torch.
            [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", "torch", "numpy"],
            [
                *(python, "-m", "pip", "install", "--quiet", "--no-build-isolation"),
                *("--constraint", ROOT / "constraints.txt", f"{package.resolve()}[all]"),
            ],
            [python, "-m", "doctest", ROOT / "README.md"],
            [python, "-m", "fakequant", "doctor"],
        )
        for step in steps:
            done = subprocess.run([str(word) for word in step], cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                what, said = " ".join(map(str, step[1:4])), f"{done.stdout[-1500:]}{done.stderr[-1500:]}"
                print(f"{package.name}: {what} failed\n{said}")
                return False
    print(f"{package.name}: works in an empty environment, {time.perf_counter() - start:.0f} s")
    return True


def main(arguments: list[str]) -> int:
    if arguments == ["metadata"]:
        if found := unset():
            print("set these before a release:", *found, sep="\n  ")
        return bool(found)
    if arguments[:1] == ["try"] and len(arguments) > 1:
        return len(arguments) - 1 - sum(works(Path(package)) for package in arguments[1:])
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
