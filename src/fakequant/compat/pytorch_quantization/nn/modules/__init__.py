"""The quantizer, and layers that have quantizers."""
