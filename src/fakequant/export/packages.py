"""Check that the packages for export and verification are installed; `import fakequant` works without them."""

from __future__ import annotations

from importlib.util import find_spec

from fakequant.errors import ExportError


def require(*names: str) -> None:
    """Check that packages can be imported.

    Raises:
        ExportError: a package is missing; the message says how to install it.

    >>> require("numpy")
    """
    if missing := [name for name in names if find_spec(name) is None]:
        raise ExportError(f"ONNX needs {' and '.join(missing)}, not installed here; run pip install 'fakequant[onnx]'")
