"""Names that every documentation example may use, in modules, README.md and docs/."""

import pytest
import torch
from _pytest.doctest import DoctestItem

import fakequant
from fakequant.numerics import formats

NAMES = {
    **{name: value for name, value in vars(formats).items() if name.isupper()},
    **{name: getattr(fakequant, name) for name in fakequant.__all__},
    "torch": torch,
    "fq": fakequant,
}


@pytest.fixture(autouse=True)
def _example_names(request: pytest.FixtureRequest) -> None:
    """Offer torch, fq, the public names and the named formats; what the module itself defines stays the module's."""
    if isinstance(request.node, DoctestItem):
        for name, value in NAMES.items():
            request.node.dtest.globs.setdefault(name, value)
