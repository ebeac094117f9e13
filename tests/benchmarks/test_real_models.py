"""The bars of `make real-models`: each sees a row that misses it."""

from __future__ import annotations

from typing import Any

import pytest

import fakequant as fq
from benchmarks.real import __main__ as real
from benchmarks.real import encoder, next_steps

COST = {"seconds": 1.0, "bytes": 10_000_000}


def row() -> dict[str, dict[str, Any]]:
    """A row that misses nothing."""
    return {
        "float": {"parameters": 10, **COST},
        "int8": {"said": [], "bits": 8.2, "cosine": 0.99, "dB": 30.0, **COST},
        "onnx": {"exact": True, **COST},
        "int8, report": {"next": "export", "code": "", "before": 30.0, "after": 30.0, **COST},
        "int4_group32": {"said": [], "bits": 5.0, "cosine": 0.9, "dB": 12.0, **COST},
        "int4_group32, improve": {"cosine": 0.95, "dB": 15.0, **COST},
        "int4_group32, report": {"next": "more bits", "code": "...", "before": 12.0, "after": 14.0, **COST},
    }


@pytest.mark.parametrize(
    ("step", "change", "said"),
    [
        ("int4_group32", {"bits": 5.1}, "5.1 bits per weight"),
        ("int8", {"bits": 36.0}, "36.0 bits per weight"),
        ("int8", {"failed": "ConfigError: no"}, "int8: ConfigError: no"),
        ("onnx", {"exact": False}, "the ONNX file is not exact"),
        ("int8, report", {"after": 29.0}, "the advice made it worse, 30.0 dB to 29.0 dB: export"),
        ("int4_group32, improve", {"dB": 11.0}, "improve made the output worse, 12.0 dB to 11.0 dB"),
        ("int4_group32, improve", {"bytes": 6e8}, "improve took 0.60 GB, at most 0.5"),
    ],
)
def test_a_bar_that_is_missed_is_named(step: str, change: dict[str, Any], said: str) -> None:
    found = row()
    assert real.missed({"CREPE tiny": found}) == []
    found[step] |= change
    (line,) = real.missed({"CREPE tiny": found})
    assert line.startswith("CREPE tiny")
    assert said in line


def test_a_step_may_cost_a_hundredth_of_the_error() -> None:
    assert not next_steps.is_worse({"before": 30.0, "after": 29.97})
    assert next_steps.is_worse({"before": 30.0, "after": 29.95})


def test_the_encoder_gets_formats_that_exist_and_sentences_of_documentation() -> None:
    for row in encoder.ROWS:
        for spec in filter(None, (row.weight, row.input)):
            fq.QuantSpec.parse(spec.removesuffix(" dynamic"))
    found = encoder.sentences()
    assert len({*found}) == encoder.CHOOSE + encoder.JUDGE
    assert found == encoder.sentences()
