"""The packages that export and verification need, which `import fakequant` does without."""

from __future__ import annotations

from importlib.util import find_spec

from fakequant.errors import ExportError


def require(*names: str) -> None:
    """Check that packages can be imported.

    Raises:
        ExportError: names those that are missing and how to install them.

    >>> require("numpy")
    """
    if missing := [name for name in names if find_spec(name) is None]:
        raise ExportError(f"ONNX needs {' and '.join(missing)}, not installed here; run pip install 'fakequant[onnx]'")
