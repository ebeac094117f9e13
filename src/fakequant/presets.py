"""The name of `fakequant.model.presets` for imports: `from fakequant.presets import INT8`."""

import sys

import fakequant.model.presets as own
from fakequant.model.presets import *  # noqa: F403  for type checkers, which do not follow the next line

sys.modules[__name__] = own
