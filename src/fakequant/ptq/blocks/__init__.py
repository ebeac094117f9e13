"""`reconstruct`: weights of a block that learn its output."""
