"""Measurements of the project: `make bench`, `make bars`."""
