"""Runs the tests against an installed wheel, in a folder without the sources.

    python tests/native/suite.py dist/one.whl -n 2 -m 'not exhaustive'
    python tests/native/suite.py dist/one.whl tests/cli/test_cli.py

The wheel is installed into an environment of its own, which has this one's other packages. Arguments after the wheel
are pytest's; paths among them replace all tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVERYTHING = ["tests", "README.md", "docs"]
WHERE = "import fakequant, sysconfig; print(fakequant.__file__); print(sysconfig.get_path('purelib'))"


def copy(tree: Path) -> None:
    """What git knows except the package's sources, as it is in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        if not name.startswith("src/") and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)


def environment(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment with the wheel, and with this one's packages except those installed in place."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    place = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "nt" if sys.platform == "win32" else "posix_prefix", place))
    given = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *given], check=True)
    # A path that another .pth file names is not one whose own .pth files are read: there lie installations in place.
    others = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site / "others.pth").write_text("\n".join(sorted(others)) + "\n")
    return python


def main(wheel: Path, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy(tree)
        # Below the tree, so that its conftest.py serves the package's examples.
        python = environment(tree / "installed", wheel.resolve())
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        given = {"cwd": tree, "env": variables}
        said = subprocess.run([python, "-c", WHERE], **given, capture_output=True, text=True, check=True).stdout
        package, site = (Path(line) for line in said.splitlines())
        if not package.is_relative_to(site):
            sys.exit(f"{package} is imported instead of the wheel's package in {site}")
        if not any((tree / name.split("::")[0]).exists() for name in arguments):
            arguments = [*arguments, str(package.parent), *EVERYTHING]
        return subprocess.run([python, "-m", "pytest", *arguments], **given, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
