"""Formats of other programs, one module each; a new module here needs no registration."""
