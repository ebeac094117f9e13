"""`python -m fakequant.compat run SCRIPT [ARGUMENTS]` runs an unmodified script with the interfaces of this package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from fakequant.compat import INSTALLABLE, install

USAGE = f"""usage: python -m fakequant.compat run SCRIPT [ARGUMENTS]

Runs SCRIPT as `python SCRIPT [ARGUMENTS]` would, where imports of these packages give fakequant's:
{", ".join(INSTALLABLE)}"""


def main(arguments: list[str]) -> None:
    """Run the script that the command line names."""
    if arguments[:1] == ["--help"]:
        print(USAGE)
        return
    if len(arguments) < 2 or arguments[0] != "run":
        sys.exit(USAGE)
    script = Path(arguments[1])
    if not script.is_file():
        sys.exit(f"there is no script {script}\n\n{USAGE}")
    for name in INSTALLABLE:
        install(name)
    sys.argv = arguments[1:]
    # As python does: a script can import the files in its folder.
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
