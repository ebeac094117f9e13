"""Functions that the quantizers share."""

from . import quant_logging
from .quant_logging import reset_logger_handler
from .reduce_amax import reduce_amax

__all__ = ["quant_logging", "reduce_amax", "reset_logger_handler"]
