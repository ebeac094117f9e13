"""The scripts in `hostile/` that kill, save at once and change files, each for some seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

HOSTILE = Path(__file__).parent / "hostile"


@pytest.mark.skipif(sys.platform == "win32", reason="they fork")
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("saves.py", "--saves 5 --pairs 1"),
        pytest.param("kills.py", "--kills 7 --kind checkpoint run", marks=pytest.mark.exhaustive),
        ("mutations.py", "--count 100 --kind manifest header"),
    ],
)
def test_nothing_goes_wrong(script: str, arguments: str) -> None:
    command = [sys.executable, HOSTILE / script, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout
