"""Other libraries' interfaces over this package: thin edges, one module or folder for each."""

from fakequant.compat.alias import install

__all__ = ["install"]
