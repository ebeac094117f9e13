"""What runs a graph: a module of torch, one compiled function, and kernels that compute several operations at once."""
