"""Weights that several layers share, replaced once for all of them."""

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from tests.support.bits import assert_same_bits

TOKENS = torch.arange(12).view(3, 4) % 10


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))


WEIGHT = "int8 per_channel(0)"


def language(embedding: str | None = WEIGHT, head: str | None = WEIGHT, *, calibrate: bool = True) -> Language:
    rules = (
        fq.Rule("middle", input="int8", weight=WEIGHT),
        fq.Rule("embedding", weight=embedding),
        fq.Rule("head", weight=head),
    )
    model = fq.prepare(Language(), fq.Config("tied", rules))
    if calibrate:
        fq.calibrate(model, [TOKENS])
    return model.eval()


@pytest.mark.parametrize("weight", [WEIGHT, "int4 per_block(-1:4)", "int8 per_tensor", "float8_e4m3fn per_tensor"])
@pytest.mark.parametrize("calibrate", [True, False])
def test_a_tied_weight_is_replaced_once_for_all_layers(weight, calibrate):
    model = language(weight, weight, calibrate=calibrate)
    if not calibrate:
        fq.calibrate(model, [TOKENS], pattern="middle")
    expected = model(TOKENS)
    fq.bake_weights(model)
    assert_same_bits(model(TOKENS), expected)
    assert model.head.weight is model.embedding.weight
    assert not any(name.endswith("_weight_quantizer") for name in fq.nn.quantizers(model))


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (lambda: language(None), "only one of them quantizes it"),
        (lambda: language(head=None), "only one of them quantizes it"),
        (lambda: language(head="int4 per_channel(0)"), r"they quantize it as int8 per_channel\(0\) and as int4 per"),
        (lambda: _with_other_scales(language()), r"they quantize it as int8 per_channel\(0\) with different scales"),
    ],
    ids=["float embedding", "float head", "other format", "other scales"],
)
def test_layers_that_would_not_agree_are_refused(make, difference):
    model = make()
    expected = model(TOKENS)
    with pytest.raises(ConfigError, match=f"the layers embedding and head share one weight, but {difference}"):
        fq.bake_weights(model)
    assert_same_bits(model(TOKENS), expected)


def _with_other_scales(model: Language) -> Language:
    model.head._weight_quantizer.scale *= 2
    return model


def test_two_of_three_that_share_a_weight_are_named():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[2].weight = model[0].weight
    fq.prepare(model, fq.presets.INT8_WEIGHT_ONLY.with_rule(fq.Rule("2", weight="int4")))
    with pytest.raises(ConfigError, match="the layers 0 and 2 share one weight"):
        fq.bake_weights(model)


def test_the_old_name_says_the_new_one():
    model, other = language(), language()
    with pytest.warns(DeprecationWarning, match="fakequant.fold is now called fakequant.bake_weights") as said:
        assert fq.fold(model) is model
    assert said[0].filename == __file__
    assert_same_bits(model(TOKENS), fq.bake_weights(other)(TOKENS))
