"""Names that every documentation example may use, in modules, README.md and docs/."""

import pytest
import torch
from _pytest.doctest import DoctestItem

import fakequant


@pytest.fixture(autouse=True)
def _example_names(request: pytest.FixtureRequest) -> None:
    """Offer torch, fq and the public names; a name that the module itself defines stays the module's."""
    if not isinstance(request.node, DoctestItem):
        return
    examples = request.node.dtest.globs
    for name, value in {"torch": torch, "fq": fakequant, **vars(fakequant)}.items():
        if name in ("torch", "fq", *fakequant.__all__):
            examples.setdefault(name, value)
