"""One layer: choices of ranges and codes from the sums over its inputs x, above all of x x^T."""
