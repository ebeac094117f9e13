"""Adapters of peft on quantized models; saving and freezing them is done in `fakequant.nn.quantizer`."""

from fakequant.nn.merged_adapters import train_merged as train_merged
