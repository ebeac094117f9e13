"""The logger of the interface."""

from __future__ import annotations

import logging

logger = logging.getLogger("fakequant.compat.pytorch_quantization")
"""The logger of all messages of the interface."""


def reset_logger_handler() -> None:
    """Remove all handlers from Python's root logger."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
