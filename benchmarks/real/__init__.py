"""Trained models of packages, as a new user quantizes them: `make real-models`."""
