"""What layers get: a run of all batches that stops before each layer."""
