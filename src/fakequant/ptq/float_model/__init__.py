"""Transforms of the float model that keep its function."""
