import inspect

import pytest

from fakequant import errors
from fakequant.errors import FakeQuantError, nearest

CLASSES = [
    c
    for _, c in inspect.getmembers(errors, inspect.isclass)
    if c is not FakeQuantError and c.__module__ == errors.__name__
]
WARNINGS = [c for c in CLASSES if issubclass(c, Warning)]


@pytest.mark.parametrize("error", [c for c in CLASSES if c not in WARNINGS], ids=lambda c: c.__name__)
def test_every_error_is_ours_and_a_built_in_one(error):
    assert issubclass(error, FakeQuantError)
    assert issubclass(error, ValueError | TypeError | RuntimeError | OSError | AttributeError)
    assert error.__doc__


@pytest.mark.parametrize("warning", WARNINGS, ids=lambda c: c.__name__)
def test_every_warning_is_a_user_warning(warning):
    assert issubclass(warning, UserWarning)
    assert warning.__doc__


def test_nearest_names():
    assert nearest("per_chanel", ["per_channel", "per_tensor"]) == "; did you mean per_channel?"
    assert nearest("qqq", ["a", "b"]) == "; known names are a, b"
