"""Batches in a list, as functions of the package pass them on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fakequant.data.batches import Batches, Forward, KeptBatches


def kept(batches: Iterable[Any], forward: Forward | None = None) -> KeptBatches:
    return Batches(batches, "the test", forward=forward).kept()
