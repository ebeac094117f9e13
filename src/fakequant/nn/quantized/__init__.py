"""Layers of torch and of other libraries with quantizers, and what all of them share."""
