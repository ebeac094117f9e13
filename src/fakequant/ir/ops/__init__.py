"""The rows of the table of operations, by kind; importing this package fills the table."""

from __future__ import annotations

from fakequant.ir.ops import elementwise, products, quantization

__all__ = ["elementwise", "products", "quantization"]
