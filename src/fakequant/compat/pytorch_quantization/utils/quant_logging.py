"""The logger of the interface."""

from __future__ import annotations

import logging

logger = logging.getLogger("fakequant.compat.pytorch_quantization")
"""Where all messages of the interface go."""


def reset_logger_handler() -> None:
    """Take every handler away from Python's root logger."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
