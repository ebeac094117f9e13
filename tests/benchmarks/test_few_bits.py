"""Training in few bits is measured with the formats that a row names."""

from __future__ import annotations

import argparse
import math

import pytest

from benchmarks.few_bits import trained, variants
from examples.demo import text

ROWS = ["NVFP4_TRAINING", "MXFP4_TRAINING, gradients in float", "FP8_TRAINING"]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_trained(name: str) -> None:
    corpus = text.load_corpus()
    short = text.Corpus(corpus.training, corpus.development, corpus.held_out[:20_000])
    given = argparse.Namespace(steps=8, features=32, compiled=False)
    assert math.isfinite(trained(short, variants()[name], given, 0)["nats"])
