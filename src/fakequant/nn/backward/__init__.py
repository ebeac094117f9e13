"""Quantized gradients: how the backward products of a layer are quantized, and their computation."""
