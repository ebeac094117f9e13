"""Other people's architectures through every step of the package: `python -m benchmarks.real_models`, by hand."""
