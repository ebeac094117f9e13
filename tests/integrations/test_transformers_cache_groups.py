"""A cache that quantizes groups of tokens, late: against the rule by hand, query by query, and however tokens come."""

from __future__ import annotations

import random
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.functional import fake_quantize
from fakequant.model.weights import spec_bits
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.transforms import walsh_hadamard
from tests.support.transformers_models import ARCHITECTURES, own_attention, tokens
from tests.support.vision import import_torchvision

pytest.importorskip("transformers", reason="transformers is not installed")
import_torchvision()  # transformers imports it for its losses

from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from fakequant.integrations.transformers_cache import FakeQuantCache, name_attention  # noqa: E402
from tests.support.transformers_caches import KEYS, LAYOUTS, VALUES, cache_of, generated, named, prompt  # noqa: E402

GROUP = {"groups": 3, "groups and window": 3, "window": 1, "two groups": 6, "fp8": 1, "nvfp4": 1, "shared scales": 2}


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products have the bits that a token alone has, as those of torch need not: their order of sums follows shapes."""

    def linear(layer: nn.Linear, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * layer.weight).sum(-1)

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, **options: Any) -> Tensor:
        queries, length = query.shape[2], key.shape[2]
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        if attn_mask is None:
            attn_mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)[None, None]
        mask = attn_mask.expand(len(query), -1, queries, -1)
        out = torch.zeros(*query.shape[:3], value.shape[3])
        for row in range(len(query)):
            for place in range(queries):
                seen = mask[row, 0, place]
                if bool(seen.any()):
                    score = (key[row][:, seen] * query[row][:, place, None]).sum(-1) * options["scale"]
                    out[row, :, place] = (score.softmax(-1)[..., None] * value[row][:, seen]).transpose(1, 2).sum(-1)
        return out

    monkeypatch.setattr(nn.Linear, "forward", linear)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)


@pytest.fixture
def by_hand() -> Any:
    """Has a model give each query its own keys and values, of a float cache: the rule, without a thought of speed."""

    def give(model: nn.Module, layout: str, mask: Tensor) -> nn.Module:
        group, residual = GROUP[layout], LAYOUTS[layout].get("residual_length", 0)
        specs = LAYOUTS[layout]["keys"], LAYOUTS[layout].get("values", LAYOUTS[layout]["keys"])

        def seen(states: Tensor, spec: str, pad: int, tokens_written: int) -> Tensor:
            states = states[:, :, :tokens_written].clone()
            for start in range(pad, tokens_written - residual - group + 1, group):
                part = slice(start, start + group)
                states[:, :, part] = fake_quantize(states[:, :, part], spec)
            return states

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, **options: Any) -> Any:
            length, queries = key.shape[2], query.shape[2]
            rows = []
            for row, pad in enumerate((mask == 0).sum(-1).repeat_interleave(len(query) // len(mask)).tolist()):
                outs = []
                for place in range(queries):
                    written = length - queries + place + 1
                    states = (seen(x[row : row + 1], s, pad, written) for x, s in zip((key, value), specs, strict=True))
                    one = query[row : row + 1, :, place : place + 1]
                    own = torch.arange(written).view(1, 1, 1, -1) >= pad
                    outs.append(sdpa_attention_forward(module, one, *states, own, **options)[0])
                rows.append(torch.cat(outs, 1))
            return torch.cat(rows), None

        return register(model, attend)

    with own_attention() as register:
        yield give


def states(length: int, sequences: int = 1) -> tuple[Tensor, Tensor]:
    """Keys and values [sequences, 2, length, 8], each with a large channel."""
    drawn = torch.randn(2, sequences, 2, length, 8, generator=torch.Generator().manual_seed(0))
    drawn[..., 3] *= 8
    return drawn[0], drawn[1]


def write(cache: FakeQuantCache, own: tuple[Tensor, Tensor], start: int, stop: int) -> None:
    cache.update(own[0][:, :, start:stop], own[1][:, :, start:stop], 0)


def held(cache: FakeQuantCache) -> tuple[Tensor, Tensor]:
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert keys is not None
    assert values is not None
    return keys, values


def same(first: FakeQuantCache, second: FakeQuantCache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(held(first), held(second), strict=True))


@pytest.mark.parametrize("further", [{}, {"num_beams": 3, "max_new_tokens": 5}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_has_the_bits_of_the_rule_by_hand(
    layout: str, further: dict[str, Any], by_hand: Any, row_by_row: None
) -> None:
    model, inputs = named(), prompt()
    ours = generated(model, cache_of(layout, inputs["attention_mask"]), inputs, **further)
    plain = generated(model, DynamicCache(), inputs, **further)
    expected = generated(by_hand(model, layout, inputs["attention_mask"]), DynamicCache(), inputs, **further)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])
    assert not torch.equal(ours[1], plain[1])


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forward_of_all_tokens_has_the_bits_of_single_steps(layout: str, rotate: bool, row_by_row: None) -> None:
    model, ids = named(), torch.arange(2, 25).view(1, 23)
    found = []
    for sizes in ([23], [1] * 23, [9, *[1] * 8, 4, 2]):
        cache, logits = cache_of(layout, rotate=rotate), []
        with torch.no_grad():
            for part in ids.split(sizes, 1):
                logits.append(model(part, past_key_values=cache).logits)
        found.append((torch.cat(logits, 1), *held(cache), *(cache.layers[1].keys, cache.layers[1].values)))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_changes_nothing(layout: str, row_by_row: None) -> None:
    model, inputs = named(), prompt()
    together = generated(model, cache_of(layout, inputs["attention_mask"]), inputs)
    for row, pad in enumerate((0, 4)):
        alone = {name: x[row : row + 1, pad:] for name, x in inputs.items()}
        sequences, logits = generated(model, cache_of(layout), alone)
        assert torch.equal(sequences[0], together[0][row, pad:])
        assert torch.equal(logits[:, 0], together[1][:, row])


@pytest.mark.parametrize("name", ["gpt2", "gemma", "mixtral", "phi3", "qwen3_moe"])
def test_other_architectures(name: str) -> None:
    model, ids = name_attention(ARCHITECTURES[name].make()), torch.arange(2, 25).view(1, 23)  # type: ignore[type-var]
    with torch.no_grad():
        together = model(ids, past_key_values=cache_of("groups and window")).logits
        cache = cache_of("groups and window")
        alone = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(1, 1)], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_decoder_with_an_encoder() -> None:
    """T5 has a bias for each place, which is cut as the mask is."""
    architecture = ARCHITECTURES["t5"]
    model = name_attention(architecture.make()).double()  # type: ignore[type-var]
    inputs = {**architecture.inputs(), "use_cache": True, "decoder_input_ids": torch.arange(2, 14).view(1, 12)}
    inputs = {name: x[:1] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    with torch.no_grad():
        both = EncoderDecoderCache(cache_of("groups and window"), DynamicCache())
        together = model(**inputs, past_key_values=both).last_hidden_state
        both, alone = EncoderDecoderCache(cache_of("groups and window"), DynamicCache()), []
        for part in inputs.pop("decoder_input_ids").split(1, 1):
            alone.append(model(**inputs, decoder_input_ids=part, past_key_values=both).last_hidden_state)
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=0, atol=1e-12)


def test_fixed_ranges_behind_a_window() -> None:
    own, quantizer = states(9), Quantizer("int8 per_channel(3)")
    quantizer.set_qparams(fq.QParams(torch.linspace(0.02, 0.4, 8).view(1, 1, 1, 8)))
    cache = FakeQuantCache([quantizer], "int8 per_token", residual_length=4)
    write(cache, own, 0, 9)
    assert torch.equal(held(cache)[0], torch.cat([quantizer(own[0][:, :, :5]), own[0][:, :, 5:]], 2))


def test_padding_behind_the_tokens_changes_nothing_before_it() -> None:
    model = named().double()
    ids = torch.arange(2, 22).view(2, 10)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        together = model(ids * mask, attention_mask=mask, past_key_values=cache_of("groups", mask)).logits
        alone = model(ids[1:, :6], past_key_values=cache_of("groups")).logits
    torch.testing.assert_close(together[1:, :6], alone, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mask", [None, torch.tensor([[1] * 40, [0] * 5 + [1] * 35])])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_and_cropping_in_any_order_is_writing_what_is_left(layout: str, mask: Tensor | None) -> None:
    drawn = random.Random(0)
    own = states(40, 1 if mask is None else 2)
    for _ in range(20):
        cache, length = cache_of(layout, mask), drawn.randrange(1, 12)
        write(cache, own, 0, length)
        cache.activate_past_recording()
        for _ in range(5):
            before = length
            for _ in range(drawn.randrange(1, 3)):
                new = drawn.randrange(1, 4)
                write(cache, own, length, length + new)
                length += new
            removed = drawn.randrange(0, length - before + 1)
            cache.crop(-removed)
            length -= removed
        expected = cache_of(layout, mask)
        write(expected, own, 0, length)
        assert same(cache, expected)


def test_crop_without_a_record() -> None:
    own, cache, expected = states(20), cache_of("groups and window"), cache_of("groups and window")
    write(cache, own, 0, 10)
    with pytest.raises(ConfigError, match="to remove 3 positions, it needs quantized positions in float again"):
        cache.crop(-3)
    write(expected, own, 0, 10)
    assert same(cache, expected)
    cache.crop(-2)  # six are quantized after 8 as after 10
    write(cache, own, 8, 13)
    write(expected, own, 10, 13)
    assert same(cache, expected)


def test_a_refused_crop_changes_nothing() -> None:
    own, cache, expected = states(20), cache_of("groups and window"), cache_of("groups and window")
    cache.activate_past_recording()
    for layer in (0, 1):
        cache.update(own[0], own[1], layer)
    second: Any = cache.layers[1]
    recorded, second.keys = second.keys, second.keys.clone()
    with pytest.raises(ConfigError, match="to remove 8 positions"):
        cache.crop(-8)
    second.keys = recorded
    cache.crop(-14)
    write(expected, own, 0, 6)
    assert same(cache, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_assisted_generation_gives_the_tokens_of_generation(layout: str) -> None:
    model, assistant = named(), named(num_hidden_layers=1)
    ids = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])}
    expected = model.generate(**ids, past_key_values=cache_of(layout), max_new_tokens=16, do_sample=False)
    for further in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        options = {"max_new_tokens": 16, "do_sample": False, **further}
        assert torch.equal(model.generate(**ids, past_key_values=cache_of(layout), **options), expected)


def test_sequences_are_selected_and_repeated() -> None:
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    own, cache = states(20, 2), cache_of("groups", mask)
    write(cache, own, 0, 9)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.reorder_cache(torch.tensor([0, 1]))
    picked = own[0][[1, 0]], own[1][[1, 0]]
    write(cache, picked, 9, 20)
    expected = cache_of("groups", mask[[1, 0]])
    write(expected, picked, 0, 20)
    assert same(cache, expected)
    copy = deepcopy(cache)
    write(copy, picked, 0, 3)
    assert same(cache, expected)
    assert not same(copy, expected)
    cache.reset()
    write(cache, picked, 0, 20)
    assert same(cache, expected)
    cache.reset(mask)
    write(cache, own, 0, 20)
    expected = cache_of("groups", mask)
    write(expected, own, 0, 20)
    assert same(cache, expected)


def test_gradients_reach_what_is_quantized_late() -> None:
    model = named()
    model(torch.arange(2, 14).view(1, 12), past_key_values=cache_of("groups and window")).logits.sum().backward()
    assert all(bool(layer.self_attn.k_proj.weight.grad.any()) for layer in model.model.layers)


def test_a_prepared_model_generates() -> None:
    model = fq.prepare(named(), "int8")
    fq.calibrate(model, [{**tokens(), "use_cache": False}], progress=False)
    inputs = prompt()
    sequences, _ = generated(model, cache_of("groups", inputs["attention_mask"]), inputs)
    assert sequences.shape == (2, 20)


def test_rotated_keys_keep_scores_and_have_less_error_at_an_outlier() -> None:
    keys, queries = torch.randn(2, 1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 3] *= 32
    scores = queries @ keys.mT
    both = walsh_hadamard(queries) @ walsh_hadamard(keys).mT
    torch.testing.assert_close(both, scores, rtol=1e-5, atol=1e-4)
    errors = []
    for rotate in (False, True):
        cache = FakeQuantCache("int4 per_token", rotate=rotate)
        found, _ = cache.update(keys, keys, 0)
        errors.append(float((queries @ found.mT - scores).square().mean()))
        assert torch.equal(held(cache)[1], fake_quantize(keys, "int4 per_token"))  # values are not rotated
    quantized = fake_quantize(walsh_hadamard(keys), "int4 per_token")
    expected = walsh_hadamard(queries) @ quantized.mT
    torch.testing.assert_close(queries @ found.mT, expected, rtol=1e-5, atol=1e-4)
    assert errors[1] < errors[0] / 4


def test_the_text_says_what_is_left_in_float() -> None:
    assert (
        repr(cache_of("groups")) == f"FakeQuantCache(keys {KEYS}, values {VALUES}, the newest 0 to 2 tokens in float)"
    )
    assert repr(cache_of("window", rotate=True)) == (
        "FakeQuantCache(keys int4 per_token rotated, values int4 per_token, the newest 3 tokens in float)"
    )
    assert repr(FakeQuantCache("int8 per_token")) == "FakeQuantCache(keys int8 per_token, values int8 per_token)"


def test_the_page_has_the_bits_of_every_layout() -> None:
    page = (Path(__file__).parents[2] / "docs/transformers.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `([^`|]+)` \| (?:the same|`([^`|]+)`) \| ([0-9.]+) \|$", page, re.M)
    assert len(rows) == 8
    for keys, values, bits in rows:
        for spec in (keys, values or keys):
            found = spec_bits(fq.QuantSpec.parse(spec), (1, 8, 4096, 128)).per_weight
            assert found == pytest.approx(float(bits), abs=1e-4)
        if "per_tensor" not in keys:
            FakeQuantCache(keys, values or keys)
