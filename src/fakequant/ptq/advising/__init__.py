"""Advice that was tried before it is given."""
