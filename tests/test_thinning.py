"""The tests that run only some of their cases each time: spread over all parameters, the others when asked for."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import runs_always
from tests.support.cases import DTYPES, FORMATS

TESTS = Path(__file__).parent


@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_every_two_parameters_meet(every):
    sizes = (7, 6, 5)
    kept = [places for places in itertools.product(*map(range, sizes)) if runs_always(places, every)]
    assert len(kept) in range(210 // every - 2, 210 // every + 3)
    for one, other in itertools.combinations(range(3), 2):
        assert len({(places[one], places[other]) for places in kept}) == sizes[one] * sizes[other]


@pytest.mark.parametrize("every", [3, 5])
def test_what_tests_take_in_turn_by_sums_of_places_is_met(every):
    kept = [places for places in itertools.product(range(26), range(4)) if runs_always(places, every)]
    assert {sum(places) % 12 for places in kept} == set(range(12))


def test_each_case_runs_every_time_or_when_asked_for():
    def collected(*options):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]
        found = subprocess.run(
            [*command, *options, "test_rectified.py"], cwd=TESTS, capture_output=True, text=True, check=True
        )
        return {line for line in found.stdout.splitlines() if "::test_equals_one_after_the_other" in line}

    usual, asked = collected("-m", "not exhaustive"), collected("-m", "exhaustive")
    assert not usual & asked
    assert len(usual | asked) == len(FORMATS) * len(DTYPES)
    assert 0 < len(usual) < len(asked)
