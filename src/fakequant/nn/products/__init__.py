"""Weights, and how rows of inputs are multiplied with them: what `layer.products()` and `site_products` give."""
