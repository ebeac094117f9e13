"""Ranges of quantizers: learned ones, and parts of their arithmetic that stay exact under every setting."""
