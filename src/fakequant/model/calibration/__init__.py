"""Ranges from data: batches go through a model, and its quantizers see them."""
