"""What a cache refuses: ranges of a call, masks of other prompts, attention that sees the same keys for all queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.errors import ConfigError
from tests.support.transformers_models import ARCHITECTURES, tokens
from tests.support.vision import import_torchvision

pytest.importorskip("transformers", reason="transformers is not installed")
import_torchvision()  # transformers imports it for its losses

from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402

from fakequant.integrations.transformers_cache import FakeQuantCache  # noqa: E402
from tests.support.transformers_caches import KEYS, cache_of, generated, named, prompt  # noqa: E402

OF_A_CALL = (
    *("int8 per_tensor", "int8 per_channel(1)", "int8 per_channel(-2)", "int8 per_token(-2)"),
    "float4_e2m1fn per_block(-1:4) scale=float8_e4m3fn@per_tensor",
)


@pytest.mark.parametrize("spec", OF_A_CALL)
def test_ranges_of_a_call_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="range of keys depends on other sequences, or on the number of tokens"):
        FakeQuantCache(spec)


def test_what_cannot_be_is_refused() -> None:
    sliding = ARCHITECTURES["gpt_oss"].make(sliding_window=4, layer_types=["sliding_attention"])
    with pytest.raises(ConfigError, match="a sliding window drops positions of a group before"):
        FakeQuantCache(KEYS, config=sliding.config)  # type: ignore[arg-type]
    for length in (-1, 2.5, True, "8"):
        with pytest.raises(ConfigError, match=f"residual_length is a number of tokens from 0 on, got {length!r}"):
            FakeQuantCache(KEYS, residual_length=length)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rotate is True or False, got 'no'"):
        FakeQuantCache(KEYS, rotate="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 sequences may begin with padding"):
        generated(named(), cache_of("groups"), prompt())
    with pytest.raises(ConfigError, match="of the cache has 3 sequences, and the model writes 2"):
        generated(named(), cache_of("groups", torch.ones(3, 11)), prompt())
    for mask in ([1, 1, 1], [[1, 0, 1]], [[0, 1, 0, 1]]):
        with pytest.raises(ConfigError, match="padding only before and after the tokens"):
            cache_of("groups", torch.tensor(mask))
        with pytest.raises(ConfigError, match="padding only before and after the tokens"):
            cache_of("groups", mask)  # type: ignore[arg-type]


def padded(*lengths: int) -> Tensor:
    """A mask of 11 tokens; the first ones are padding."""
    return (torch.arange(11) >= torch.tensor(lengths).view(-1, 1)).long()


@pytest.mark.parametrize(
    ("mask", "row", "found", "known"),
    [
        (padded(0, 0), 1, 4, 0),
        (padded(4, 0), 0, 0, 4),
        (padded(0), 1, 4, 0),
        (padded(0, 3), 1, 4, 3),
        (padded(0, 5), 1, 4, 5),
        (padded(0, 11), 1, 4, 11),
    ],
)
def test_a_mask_of_another_prompt_is_noticed(mask: Tensor, row: int, found: int, known: int) -> None:
    model, inputs = named(), prompt()
    message = f"sequence {row} begins with {found} tokens of padding in the mask of the model, but {known} in the mask"
    with pytest.raises(ConfigError, match=message):
        generated(model, cache_of("groups", mask), inputs)
    cache = cache_of("groups", inputs["attention_mask"])
    generated(model, cache, inputs)
    cache.reset(mask)
    with pytest.raises(ConfigError, match=message):
        generated(model, cache, inputs)


def test_padding_without_a_mask_is_noticed() -> None:
    model, inputs = named(), {name: x[1:] for name, x in prompt().items()}
    with pytest.raises(ConfigError, match="sequence 0 begins with 4 tokens of padding in the mask of the model, but 0"):
        generated(model, cache_of("groups"), inputs)
    del inputs["attention_mask"]
    with torch.no_grad(), pytest.raises(ConfigError, match=r"sequence 0 begins with 0 tokens .*, but 4 in"):
        model(**inputs, past_key_values=cache_of("groups", padded(4)))


def test_a_later_call_and_a_mask_of_floats_are_compared() -> None:
    model, inputs = named(), prompt()
    cache, ids = cache_of("groups", inputs["attention_mask"]), inputs["input_ids"]
    longer = torch.cat([inputs["attention_mask"], torch.ones(2, 9, dtype=torch.long)], 1)
    seen = torch.ones(20, 20, dtype=torch.bool).tril() & longer[:, None, None].bool()
    floats = torch.zeros(2, 1, 20, 20).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        model(ids, attention_mask=floats[:, :, :11, :11], past_key_values=cache)
        with pytest.raises(ConfigError, match=r"sequence 1 begins with 0 tokens .*, but 4 in"):
            model(ids[:, :9], attention_mask=torch.ones_like(longer), past_key_values=cache)
        cache = cache_of("groups", inputs["attention_mask"])
        model(ids, attention_mask=inputs["attention_mask"], past_key_values=cache)
        windows = floats.masked_fill(torch.ones(20, 20, dtype=torch.bool).tril(-6), torch.finfo(torch.float32).min)
        model(ids[:, :9], attention_mask=windows[:, :, 11:], past_key_values=cache)  # no query of these sees token 0
        with pytest.raises(ConfigError, match=r"sequence 1 begins with 4 tokens .*, but 0 in"):
            model(ids, attention_mask=floats[:, :, :11, :11], past_key_values=cache_of("groups", padded(0, 0)))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_that_gives_all_queries_the_same_keys_is_refused(implementation: str) -> None:
    model = ARCHITECTURES["llama"].make(attn_implementation=implementation)
    ids = torch.arange(2, 12).view(1, 10)
    with torch.no_grad(), pytest.raises(ConfigError, match=r"queries of this call see .*name_attention\(model\)"):
        model(ids, past_key_values=cache_of("groups"))
    with torch.no_grad():  # one token at a call needs no name
        cache, expected = cache_of("groups"), cache_of("groups")
        for part in ids.split(1, 1):
            logits = model(part, past_key_values=cache).logits
        expected_logits = named(num_hidden_layers=1)(ids, past_key_values=expected).logits
    torch.testing.assert_close(logits, expected_logits[:, -1:], rtol=1e-5, atol=1e-5)


def test_attention_with_quantizers_of_keys_is_refused() -> None:
    model, example = named(), {**tokens(), "use_cache": False}
    rules = fq.Config("attention", (fq.Rule("*", input="int8 per_channel(1)", ops=("attention",)),))
    fq.prepare(model, rules, example=example)
    fq.calibrate(model, [example], progress=False)
    with torch.no_grad(), pytest.raises(ConfigError, match="without quantizers of keys and values"):
        model(torch.arange(2, 12).view(1, 10), past_key_values=cache_of("groups"))


def test_attention_to_an_encoder_is_refused() -> None:
    architecture = ARCHITECTURES["t5"]
    model, inputs = architecture.make(), {**architecture.inputs(), "use_cache": True}
    caches = DynamicCache(), cache_of("groups", inputs["attention_mask"])
    with torch.no_grad(), pytest.raises(ConfigError, match="the queries of this call see different keys"):
        model(**inputs, past_key_values=EncoderDecoderCache(*caches))
