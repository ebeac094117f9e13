"""The order of what `advise` tries, and its answer, from scores that are given."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fakequant.ptq import Compared
from fakequant.ptq.advice import SearchOrder, SizeClass
from fakequant.ptq.trial import Variant

SIZES = [SizeClass(400, ("A4", "B4")), SizeClass(800, ("A8", "B8")), SizeClass(801, ("W8",))]


def climbed(
    score: Callable[[Variant], float], floor: float, has_metric: bool = False, static: tuple[str, ...] = ("A8",)
) -> tuple[SearchOrder, list[Variant]]:
    """The ladder after all that it asks for; scores are in dB, or of a metric."""
    ladder, tried = SearchOrder(SIZES, static, floor, has_metric), []
    for way, follows in ladder.ways():
        tried.append(way)
        assert follows
        value = score(way)
        error = 0.1 if has_metric else 10 ** (-value / 10)
        ladder.rows[way] = Compared(*way, error=error, metric=value if has_metric else None, bytes=len(tried))
    return ladder, tried


def by_preset(**scores: float) -> Callable[[Variant], float]:
    return lambda way: scores[way.preset]


def test_presets_end_with_the_first_size_that_meets_the_floor() -> None:
    ladder, tried = climbed(by_preset(A4=21, B4=22, A8=30, B8=30, W8=40), 20)
    assert tried == [Variant("A4"), Variant("B4")]
    assert ladder.answer is not None
    assert ladder.answer.preset == "B4"  # the best of its size, not the first that is enough


def test_what_costs_more_is_tried_below_that_size_alone() -> None:
    gains = {"": 0, "fast": 3, "best": 4}
    scores = by_preset(A4=16, B4=15, A8=25, B8=22, W8=40)
    ladder, tried = climbed(lambda way: scores(way) + gains[way.steps], 20)
    assert tried == [
        *(Variant(name) for name in ("A4", "B4", "A8", "B8")),
        Variant("A4", steps="fast"),
        Variant("B4", steps="fast"),
        Variant("A4", steps="best"),
    ]
    assert ladder.answer is not None
    assert ladder.answer.way == ("A4", "mse", "best")


def test_methods_are_tried_for_static_inputs() -> None:
    ladder, tried = climbed(lambda way: 25.0 if way.method == "percentile" else 19.0 if "8" in way.preset else 5.0, 24)
    assert tried[:5] == [Variant(name) for name in ("A4", "B4", "A8", "B8", "W8")]
    assert tried[5:7] == [Variant("A8", method) for method in ("max", "percentile")]
    assert ladder.answer is not None
    assert ladder.answer.way == ("A8", "percentile", "")


def test_where_none_meets_the_floor_the_best_of_all_is_the_answer() -> None:
    ladder, tried = climbed(by_preset(A4=10, B4=11, A8=30, B8=31, W8=40), 100)
    assert [way for way in tried if way.steps] == [Variant("W8", steps="fast")]  # the others are out of reach
    assert ladder.answer is not None
    assert (ladder.answer.preset, ladder.meets(ladder.answer)) == ("W8", False)


def test_what_costs_more_must_be_clearly_better() -> None:
    def score(way: Variant) -> float:
        return 30.0 + 0.3 * (way.steps == "fast") if way.preset == "W8" else 1.0

    ladder, tried = climbed(score, 32)
    assert Variant("W8", steps="fast") in tried
    assert ladder.answer is not None
    assert ladder.answer.way == ("W8", "mse", "")


def test_by_a_metric_everything_is_tried_until_it_is_met() -> None:
    ladder, tried = climbed(by_preset(A4=1, B4=2, A8=3, B8=4, W8=5), 6, has_metric=True)
    assert sum(way.steps == "best" for way in tried) == len(SIZES)
    assert ladder.answer is not None
    assert ladder.answer.preset == "W8"


def test_of_equal_models_one_is_improved() -> None:
    ladder = SearchOrder([SizeClass(1, ("A", "B", "C"))], (), 20)
    for way, _ in ladder.ways():
        error = 0.05 if way.preset == "C" else 0.02
        ladder.rows[way] = Compared(*way, error=error, bytes=1.0)
    assert [way.preset for way in ladder.rows if way.steps == "fast"] == ["A", "C"]


def test_what_fails_is_no_answer() -> None:
    ladder = SearchOrder([SizeClass(1, ("A", "B"))], (), 20)
    for way, _ in ladder.ways():
        failed = "why" if way.preset == "A" else ""
        ladder.rows[way] = Compared(*way, failed=failed) if failed else Compared(*way, error=1.0)
    assert ladder.answer is not None
    assert ladder.answer.preset == "B"


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_outputs_without_a_number_are_the_worst(error: float) -> None:
    ladder = SearchOrder([SizeClass(1, ("A", "B"))], (), 20)
    for way, _ in ladder.ways():
        ladder.rows[way] = Compared(*way, error=error if way.preset == "A" else 0.5)
    assert ladder.answer is not None
    assert ladder.answer.preset == "B"
