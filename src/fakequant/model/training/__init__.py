"""Training with quantizers, and batch normalisations that are folded."""
