"""`improve`: every layer in turn, judged by the output, and resumed."""
