"""The arithmetic of engines, an engine a file: how a device stores the results of functions as codes."""

from fakequant.engines import qnn

__all__ = ["qnn"]
