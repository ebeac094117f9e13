"""The release of pytorch-quantization whose interface this is."""

__version__ = "2.2.1"
