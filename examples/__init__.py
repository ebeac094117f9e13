"""Programs to read and run from a clone; the package does not need them."""
