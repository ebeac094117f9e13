"""Other people's architectures through every step of the package: `python -m benchmarks.zoo`, by hand."""
