"""The entry point of the command `fakequant`; it works without the packages of the extra `cli`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_NEEDED = ("typer", "rich", "safetensors")


def main() -> None:
    """Run the command line, or name the packages that are missing."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        sys.exit(f"the command line needs {' and '.join(missing)}: pip install fakequant[cli]")
    from fakequant.cli.commands import app

    app(prog_name="fakequant")
