"""Check that the packages for export and verification are installed; `import fakequant` works without them."""

from __future__ import annotations

from importlib.util import find_spec

from fakequant.errors import ExportError


def require(*names: str, reader: str = "ONNX", install: str = "'fakequant[onnx]'") -> None:
    """Check that packages can be imported.

    Args:
        names: of the packages.
        reader: what needs them.
        install: what pip installs.

    Raises:
        ExportError: a package is missing; the message says how to install it.

    >>> require("numpy")
    """
    if missing := [name for name in names if find_spec(name) is None]:
        raise ExportError(f"{reader} needs {' and '.join(missing)}, not installed here; run pip install {install}")
