"""Adapters of peft on quantized models; where they are saved and frozen, `fakequant.nn.quantizer` does it by itself."""

from fakequant.nn.merged_adapters import train_merged as train_merged
