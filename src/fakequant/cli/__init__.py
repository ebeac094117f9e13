"""The command `fakequant`: what runs before its packages are known to be there."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_NEEDED = ("typer", "rich", "safetensors")


def main() -> None:
    """Run the command line, or say what to install for it."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        sys.exit(f"the command line needs {' and '.join(missing)}: pip install fakequant[cli]")
    from fakequant.cli.commands import app

    app(prog_name="fakequant")
