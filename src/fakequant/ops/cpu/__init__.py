"""C++ kernels for the CPU."""
