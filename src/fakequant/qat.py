"""The name of `fakequant.model.training.qat` for imports: `from fakequant.qat import finetune`."""

import sys

import fakequant.model.training.qat as own
from fakequant.model.training.qat import *  # noqa: F403  for type checkers, which do not follow the next line

sys.modules[__name__] = own
