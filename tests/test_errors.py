import inspect

import pytest

from fakequant import errors
from fakequant.errors import FakeQuantError, nearest

CLASSES = [
    c
    for _, c in inspect.getmembers(errors, inspect.isclass)
    if c is not FakeQuantError and c.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_error_is_ours_and_a_built_in_one(error):
    assert issubclass(error, FakeQuantError)
    assert issubclass(error, ValueError | TypeError | RuntimeError | OSError)
    assert error.__doc__


def test_nearest_names():
    assert nearest("per_chanel", ["per_channel", "per_tensor"]) == "; did you mean per_channel?"
    assert nearest("qqq", ["a", "b"]) == "; known names are a, b"
