"""Functions in a forward that get quantizers: where, by which rules, and for which engine."""
