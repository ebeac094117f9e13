"""The kernels, in triton's language; importing them imports triton."""
