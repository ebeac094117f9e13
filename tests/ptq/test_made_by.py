"""What a model was quantized by, read from its quantizers."""

from __future__ import annotations

import pytest
from torch import nn

import fakequant as fq
from fakequant.ptq.next_step import AdviceContext, made_by, next_step
from tests.support.advised import deep, given, rows


@pytest.mark.parametrize("name", ["INT8", "FP8", "MXFP4", "INT4_GROUP32", "NVFP4", "INT8_WEIGHT_ONLY"])
def test_the_preset_of_a_model_is_found_by_its_quantizers(name: str) -> None:
    model = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64), nn.Conv1d(3, 8, 3), nn.MaxPool1d(2), nn.Linear(31, 4))
    found = made_by(fq.prepare(model, name, skip=["4"]))
    assert found is not None
    assert (found.preset.name, found.skip) == (name, ("4",))


def test_own_rules_are_of_no_preset() -> None:
    rules = fq.Config("own", (fq.Rule("*", "int8"), fq.Rule("1.0", weight="int2 per_channel(0)")))
    model = fq.prepare(deep(4), rules)
    assert made_by(model) is None
    fq.calibrate(model, [rows(0)], progress=False)
    tried = next_step(model, given([rows(0), rows(1)]), AdviceContext(worst=["1.0"])).tried
    assert 'config, skip=["1.0"])' in tried[-1].code
