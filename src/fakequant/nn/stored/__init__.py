"""Weights that are stored as codes: the tensor, and what its layer does beside its calls."""
