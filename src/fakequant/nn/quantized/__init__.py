"""Quantized layers of torch and of other libraries, and their base classes."""
