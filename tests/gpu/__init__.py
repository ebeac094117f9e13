"""What a GPU must do as a CPU does, as a program: `make test-gpu`. It needs torch and numpy, and no pytest."""


class NotHere(Exception):
    """Why something cannot be tried on this device."""
