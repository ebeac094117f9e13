"""Measurements of the project: `python -m benchmarks.kernels` and `python -m benchmarks.bars`."""
