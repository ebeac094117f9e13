"""Models larger than memory: quantized a block at a time, and written as files that other programs load."""

from fakequant.streaming.choosing import improve_folder

__all__ = ["improve_folder"]
