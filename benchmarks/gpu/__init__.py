"""Measurements on a GPU: `make bench-gpu`."""
