"""The same fake quantization by other libraries: `python -m benchmarks.peers`. One file per library."""
