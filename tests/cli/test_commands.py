"""Completion in a shell: scripts of typer, with words that the options know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fakequant.cli.commands import app

WORDS = {
    "ver": ["verify"],
    "quantize recipe.py --preset nv": ["nvfp4", "nvfp4_weight_only", "nvfp4_training", "nvfp4_four_over_six"],
    "quantize recipe.py --me": ["--method"],
    "compare recipe.py --improve f": ["fast"],
    "quantize rec": [],  # bash goes on with files
}


@pytest.mark.parametrize("line", WORDS)
def test_commands_options_and_their_words_are_completed(line: str) -> None:
    words = f"fakequant {line}".split(" ")
    asked = {"_FAKEQUANT_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    assert CliRunner(env=asked).invoke(app, prog_name="fakequant").stdout.split() == WORDS[line]


def test_completion_is_installed_for_the_shell_that_runs(tmp_path: Path) -> None:
    program = tmp_path / "fakequant"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fakequant "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = (
        "fakequant --install-completion; . ~/.bashrc; complete -p fakequant\n"
        'COMP_WORDS=(fakequant ver); COMP_CWORD=1; _fakequant_completion fakequant; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("bash completion installed")
    assert done.stdout.endswith("complete -o default -F _fakequant_completion fakequant\nverify\n")
