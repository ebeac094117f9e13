"""The quantized key/value cache: against attention that quantizes all keys and values by hand, in every step."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant import PerChannel, PerTensor, PerToken, QuantSpec
from fakequant.errors import CalibrationError, ConfigError
from fakequant.functional import fake_quantize
from fakequant.nn.quantizer import Quantizer
from tests.support.transformers_models import ARCHITECTURES, own_attention, tokens
from tests.support.vision import import_torchvision

pytest.importorskip("transformers", reason="transformers is not installed")
import_torchvision()  # transformers imports it for its losses

from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from fakequant.integrations.transformers_cache import FakeQuantCache  # noqa: E402

PER_TOKEN = QuantSpec("int8", PerToken())
ROWS = QuantSpec("int4", PerToken())
OPTIONS: Any = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def by_hand() -> Any:
    """Has a model quantize all keys and values that its attention gets, of a float cache."""

    def give(model: nn.Module, keys: Any, values: Any) -> nn.Module:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            return sdpa_attention_forward(module, query, keys(key), values(value), mask, **options)

        return register(model, attend)

    with own_attention() as register:
        yield give


def generated(model: nn.Module, cache: Any, **further: Any) -> tuple[Tensor, Tensor]:
    found = model.generate(**tokens(), past_key_values=cache, **OPTIONS, **further)  # type: ignore[operator]
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("further", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "mixtral"])
def test_generation_has_the_bits_of_quantization_by_hand(name: str, further: dict[str, Any], by_hand: Any) -> None:
    model = ARCHITECTURES[name].make(**({"n_layer": 2} if name == "gpt2" else {"num_hidden_layers": 2}))
    plain = generated(model, DynamicCache(), **further)
    ours = generated(model, FakeQuantCache(ROWS, PER_TOKEN, config=model.config), **further)  # type: ignore[arg-type]
    by_hand(model, lambda key: fake_quantize(key, ROWS), lambda value: fake_quantize(value, PER_TOKEN))
    expected = generated(model, DynamicCache(), **further)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])
    assert not torch.equal(ours[1], plain[1])


def test_fixed_ranges_of_every_layer(by_hand: Any) -> None:
    model = ARCHITECTURES["llama"].make()
    spec = QuantSpec("int8", PerChannel(3))
    steps = torch.linspace(0.002, 0.02, 8)
    quantizer = Quantizer(spec)
    quantizer.set_qparams(fq.QParams(steps.view(1, 1, 1, 8)))
    ours = generated(model, FakeQuantCache([quantizer], PER_TOKEN))
    by_hand(model, lambda key: fake_quantize(key, spec, scale=steps), lambda value: fake_quantize(value, PER_TOKEN))
    assert torch.equal(ours[1], generated(model, DynamicCache())[1])


def test_encoder_and_decoder() -> None:
    architecture = ARCHITECTURES["t5"]
    model, inputs = architecture.make(), {**architecture.inputs(), "use_cache": True}
    caches = FakeQuantCache(ROWS), FakeQuantCache(ROWS)
    with torch.no_grad():
        model(**inputs, past_key_values=EncoderDecoderCache(*caches))
        plain = EncoderDecoderCache(DynamicCache(), DynamicCache())
        model(**inputs, past_key_values=plain)
    layers = plain.self_attention_cache.layers[0], plain.cross_attention_cache.layers[0]
    for ours, float_layer in zip(caches, layers, strict=True):
        assert torch.equal(ours.layers[0].keys, fake_quantize(float_layer.keys, ROWS))  # type: ignore[arg-type]


def test_every_position_is_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    original = Quantizer.forward
    monkeypatch.setattr(Quantizer, "forward", lambda self, x: written.append(x.shape[2]) or original(self, x))
    cache = FakeQuantCache(PER_TOKEN)
    sequences, _ = generated(ARCHITECTURES["llama"].make(), cache)
    # Keys and values of the prompt, and of every new token but the last, which nothing reads.
    assert written == [6, 6, *[1, 1] * 4]
    assert cache.get_seq_length() == sequences.shape[1] - 1


def test_a_sliding_window_keeps_its_positions_alone() -> None:
    model = ARCHITECTURES["gpt_oss"].make(sliding_window=4, layer_types=["sliding_attention"])
    cache = FakeQuantCache(PER_TOKEN, config=model.config)  # type: ignore[arg-type]
    generated(model, cache)
    assert cache.layers[0].keys.shape[2] == 3  # type: ignore[union-attr]


def test_a_compiled_model_writes_the_same() -> None:
    model, ids = ARCHITECTURES["llama"].make(), tokens()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        caches = FakeQuantCache(PER_TOKEN), FakeQuantCache(PER_TOKEN)
        expected = model(**ids, past_key_values=caches[0]).logits
        assert torch.equal(compiled(**ids, past_key_values=caches[1]).logits, expected)
    assert torch.equal(caches[0].layers[0].keys, caches[1].layers[0].keys)  # type: ignore[arg-type]


def test_a_copy_continues_alone() -> None:
    model, ids = ARCHITECTURES["llama"].make(), torch.arange(1, 7).view(1, 6)
    cache = FakeQuantCache(PER_TOKEN)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        copy = deepcopy(cache)
        first = model(ids[:, :1], past_key_values=copy).logits
        assert (cache.get_seq_length(), copy.get_seq_length()) == (6, 7)
        assert torch.equal(model(ids[:, :1], past_key_values=cache).logits, first)


def test_errors() -> None:
    with pytest.raises(CalibrationError, match="the keys of layer 0 has no range; calibrate it first, or make it"):
        FakeQuantCache([Quantizer("int8")])
    with pytest.raises(ConfigError, match="values of a cache must be a QuantSpec, its text, or a quantizer for each"):
        FakeQuantCache(PER_TOKEN, 8)  # type: ignore[arg-type]
    quantizer = Quantizer(QuantSpec("int8", PerTensor()))
    quantizer.set_qparams(fq.QParams(torch.tensor(0.01)))
    model = ARCHITECTURES["llama"].make(num_hidden_layers=2)
    with pytest.raises(ConfigError, match="writes keys of layer 1 to a cache with quantizers for 1 layers"):
        generated(model, FakeQuantCache([quantizer]))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "qnn", "xnnpack", "tensorrt"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_for_an_engine_generate(name: str, target: str, cached: bool) -> None:
    """What a cache calls does not count: the example may have one or not, and every step gives the same tokens."""
    example = {**tokens(), "use_cache": cached}
    model = fq.prepare(ARCHITECTURES[name].make(), "int8", example=example, target=target)
    fq.calibrate(model, [example], progress=False)
    options = {"max_new_tokens": 5, "do_sample": False}
    found = model.generate(**tokens(), **options)
    assert torch.equal(found, model.generate(**tokens(), use_cache=False, **options))
    cache = FakeQuantCache(PER_TOKEN, config=model.config)
    assert model.generate(**tokens(), past_key_values=cache, **options).shape == found.shape
    assert torch.equal(found, pickle.loads(pickle.dumps(model)).generate(**tokens(), **options))
