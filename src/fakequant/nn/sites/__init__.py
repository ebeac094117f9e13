"""Functions in a module's own forward with quantizers: the table of functions, and the classes of their owners."""
