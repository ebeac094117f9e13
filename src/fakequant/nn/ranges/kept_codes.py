"""Codes of a weight that stay while training moves the scale under them.

Source: the second phase of EfficientQAT, arXiv 2407.11062, section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import ConfigError
from fakequant.nn.ranges.fixed_codes import FixedCodes
from fakequant.numerics import reference


class KeptCodes(FixedCodes):
    """The part of a quantizer whose weight is its fixed codes times a scale that is learned.

    The weight itself is not read and gets no gradient. It has the values of its codes again after `give_values`.
    """

    keeps_codes = False
    """Whether the codes stay while the scale is learned; `stop_learning` ends it."""

    def keep_codes(self) -> None:
        """Let the fixed codes stay whatever training does to the learned scale.

        Raises:
            ConfigError: no fixed codes, or no range that is learned by gradient.
        """
        learned = self.learned
        if self.fixed_codes is None or not (isinstance(learned, nn.Module) and [*learned.parameters()]):
            raise ConfigError(
                f"the quantizer {self.name or self} has no codes that could stay, or no scale that is learned by "
                'gradient; call fix_codes and then learn("lsq"), or fakequant.qat.set_scales(model, '
                "fakequant.qat.Scales.ONLY)"
            )
        self.keeps_codes, self._others = True, None

    def release_codes(self) -> None:
        """Forget fixed codes; from now on the weight is quantized. Its values do not change."""
        super().release_codes()
        self.keeps_codes = False

    def holds(self, weight: Tensor) -> bool:
        """As of fixed codes; those that stay are always valid."""
        return self.keeps_codes or super().holds(weight)

    def values_of_codes(self, x: Tensor) -> Tensor | None:
        """As of fixed codes; those that stay give the scale its gradient: the code less the zero point."""
        if not self.keeps_codes:
            return super().values_of_codes(x)
        return reference.dequantize(self._stored(), self.qparams(x), self.spec, x.dtype)

    def give_values(self, weight: nn.Parameter) -> None:
        """Set a weight whose codes stay to their values with the scale as it is now."""
        if self.keeps_codes:
            with torch.no_grad():
                weight.copy_(self._values(weight.dtype))

    def _needed_values(self, x: Tensor) -> Tensor | None:
        return self._values(x.dtype) if self.keeps_codes else super()._needed_values(x)

    def _stop_keeping(self) -> None:
        """Go on with fixed codes and a fixed scale: the next call sets the weight to the values."""
        if self.keeps_codes:
            self.keeps_codes, self._awaits_weight = False, True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        getattr(destination, "_metadata", {}).get(prefix[:-1], {})["keeps_codes"] = self.keeps_codes
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Go on keeping the codes of a state where its metadata, or without metadata this quantizer, says so."""
        keeps = args[0].get("keeps_codes", self.keeps_codes)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.keeps_codes = keeps and self.learned is not None and self.fixed_codes is not None
