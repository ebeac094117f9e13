"""The quick matrix: which cases of a sweep run every time; the others run with `-m exhaustive`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.support.cases import DTYPES, FORMATS
from tests.support.dynamic_cases import FORMATS as DYNAMIC_FORMATS


def in_turn(first: Iterable[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each value of the first list with one value of each other list, in turn.

    A list of pairs is given by `itertools.product`. The turn moves on by one after each round, so that it does not
    follow the last list of a product.
    """
    rows = []
    for turn, value in enumerate(first):
        values = value if isinstance(value, tuple) else (value,)
        rows.append((*values, *(other[(turn + turn // len(other)) % len(other)] for other in others)))
    return rows


def full(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every combination."""
    return list(product(*lists))


def sweep(names: str, every: Sequence[tuple[Any, ...]], quick: Sequence[tuple[Any, ...]], **given: dict[str, Any]):
    """Parametrizes a test over all rows; the rows that are not quick are exhaustive."""
    columns = [name.strip() for name in names.split(",")]
    unknown = [row for row in quick if row not in every]
    assert not unknown, f"quick rows that are not in the full matrix: {unknown}"
    return pytest.mark.parametrize(
        columns,
        [
            pytest.param(
                *(given[name][value] if name in given else value for name, value in zip(columns, row, strict=True)),
                id="-".join(map(str, row)),
                marks=() if row in quick else pytest.mark.exhaustive,
            )
            for row in every
        ],
    )


def cases_of(request: pytest.FixtureRequest, test: Callable[..., object]) -> list[dict[str, Any]]:
    """The arguments with which this run calls a test, for a fixture that makes something of all of them at once."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.obj is test]
    return [item.callspec.params for item in items]


# Every format with one dtype, so that each family of formats meets every dtype, and three formats with all dtypes. The
# tests take every granularity and arithmetic with each row, or those in turn.
FULL = full(FORMATS, DTYPES)
ONCE = in_turn(FORMATS, list(DTYPES))
QUICK = [*ONCE, *full(("int8", "float8_e4m3fn", "nf4"), DTYPES)]
DYNAMIC_FULL = full(DYNAMIC_FORMATS, DTYPES)
DYNAMIC_QUICK = in_turn(DYNAMIC_FORMATS, list(DTYPES))

# For tests of what a test over QUICK runs too, in another mode.
each_format_once = sweep("name, dtype", FULL, ONCE, dtype=DTYPES)
each_format = sweep("name, dtype", FULL, QUICK, dtype=DTYPES)
each_dynamic_format = sweep("name, dtype", DYNAMIC_FULL, DYNAMIC_QUICK, dtype=DTYPES)
