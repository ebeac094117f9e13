"""The quick matrix covers every value, and the exhaustive run has every case that the usual run leaves out."""

from itertools import product

import pytest

from tests.support import matrix
from tests.support.cases import DTYPES, FORMATS


def test_every_format_runs_and_every_family_of_formats_meets_every_dtype():
    families = {name: (type(case.oracle), case.symmetric) for name, case in FORMATS.items()}
    assert {name for name, _ in matrix.QUICK} == set(FORMATS)
    assert {(families[name], dtype) for name, dtype in matrix.QUICK} == set(product(families.values(), DTYPES))
    assert {name for name, _ in matrix.DYNAMIC_QUICK} == set(matrix.DYNAMIC_FORMATS)
    assert {dtype for _, dtype in matrix.DYNAMIC_QUICK} == set(DTYPES)


def test_a_case_is_quick_or_exhaustive():
    mark = matrix.sweep("a, b", matrix.full("xy", [1, 2]), [("x", 2), ("y", 1)], b={1: "one", 2: "two"}).mark
    assert [row.values for row in mark.args[1]] == [("x", "one"), ("x", "two"), ("y", "one"), ("y", "two")]
    assert [bool(row.marks) for row in mark.args[1]] == [True, False, False, True]
    assert [row.id for row in mark.args[1]] == ["x-1", "x-2", "y-1", "y-2"]
    with pytest.raises(AssertionError, match=r"quick rows that are not in the full matrix: \[\('z', 1\)\]"):
        matrix.sweep("a, b", matrix.full("xy", [1]), [("z", 1)])


def test_values_in_turn_meet_those_of_both_lists_of_a_product():
    rows = matrix.in_turn(product(range(6), range(4)), "abcd")
    assert len(rows) == 24
    assert {(one, turn) for one, _, turn in rows} == set(product(range(6), "abcd"))
    assert {(other, turn) for _, other, turn in rows} == set(product(range(4), "abcd"))
