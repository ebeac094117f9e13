"""A format for each layer under a budget, and comparisons of ways."""
