"""Groups of parameters for optimizers."""

from fakequant.compat.pytorch_quantization.optim import helper

__all__ = ["helper"]
