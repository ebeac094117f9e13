"""Models larger than memory: quantized a block at a time, and written as files that other programs load."""

from .folder import improve_folder

__all__ = ["improve_folder"]
