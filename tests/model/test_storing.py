"""Weights that are stored as codes: the bits of a model that keeps floats, its memory, and what is done with it."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.nn import stored as weight
from fakequant.nn.stored import StoredWeight
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
X = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))
PRESETS = [
    *("int4_weight_only", "int4_group32", "int8_weight_only", "int8", "int8_affine", "bitnet", "fp8", "mxfp4", "mxfp6"),
    *("nf4_weight_only", "nvfp4_weight_only", "gguf_q2_k", "gguf_q4_k", "gguf_q6_k", "gguf_iq4_xs"),
]


def text():
    return nn.Sequential(nn.Embedding(50, 128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128, bias=False))


def kept_and_stored(make=text, config="int4_group32", dtype=torch.float32, example=X):
    torch.manual_seed(0)
    model = make().to(dtype)
    model(example)  # lazy layers get their shapes
    model = fq.prepare(model, config, skip=[])
    fq.calibrate(model, [example], progress=False)
    stored = fq.store_codes(copy.deepcopy(model))
    return fq.store_floats(copy.deepcopy(stored)), stored


def gradient(model, example=X):
    """The output, and the gradient of what every layer behind the first gets."""
    x = model[0](example).detach().requires_grad_()
    y = model[1:](x)
    y.float().square().sum().backward()
    return y, x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", PRESETS)
def test_outputs_and_gradients_are_those_of_floats(preset, dtype):
    kept, stored = kept_and_stored(config=preset, dtype=dtype)
    assert all(type(stored[at].weight) is StoredWeight for at in (0, 1, 3))
    for one, other in zip(gradient(stored), gradient(kept), strict=True):
        assert_same_bits(one, other)
    assert_same_bits(stored[3].weight.values(), kept[3].weight)


@pytest.mark.parametrize(("preset", "bits"), [("int4_group32", 4), ("gguf_q2_k", 2), ("mxfp6", 6), ("fp8", 8)])
def test_codes_take_their_bits_and_no_float_is_kept(preset, bits):
    stored = kept_and_stored(config=preset)[1]
    stored(X)
    assert stored[1].weight.packed.numel() == 128 * 256 * bits // 8
    quantizer = stored[1].weight_quantizer
    assert quantizer.scale is stored[1].weight.scale
    held = [own for own in vars(quantizer).values() if isinstance(own, torch.Tensor)]
    assert not held
    assert quantizer.fixed_codes is None


def test_the_backward_pass_keeps_no_weight():
    stored = kept_and_stored()[1]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        stored[1](torch.ones(2, 128, requires_grad=True))
    assert any(type(x) is StoredWeight for x in saved)
    assert all(x.numel() < 128 * 256 for x in saved if type(x) is not StoredWeight)


LAYERS = [
    (lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ConvTranspose2d(16, 8, 3)), torch.randn(2, 8, 6, 6)),
    (lambda: nn.Sequential(nn.LSTM(16, 32)), torch.randn(5, 2, 16)),
    (lambda: nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)), torch.randn(5, 2, 32)),
    (lambda: nn.Sequential(nn.EmbeddingBag(50, 16)), X),
    (lambda: nn.Sequential(nn.Linear(32, 4, bias=False)), torch.randn(32)),
]


@pytest.mark.filterwarnings("ignore:1 quantized weights stay in float. 0.self_attn.out_proj:UserWarning")
@pytest.mark.parametrize(("make", "x"), LAYERS)
def test_layers_of_every_kind(make, x):
    kept, stored = kept_and_stored(make, "int8_weight_only", example=x)
    found = []
    for model in (kept, stored):
        given = x.clone().requires_grad_(x.is_floating_point())
        y = model(given)
        y = y[0] if isinstance(y, tuple) else y
        if x.is_floating_point():
            y.square().sum().backward()
        found.append((y, given.grad))
    assert_same_bits(found[0][0], found[1][0])
    assert x.dtype is torch.int64 or torch.equal(found[0][1], found[1][1])
    assert any(type(one) is StoredWeight for one in stored.parameters())
    x = x.double() if x.is_floating_point() else x  # the graph of the call above is alive
    moved, expected = (model.double()(x) for model in (stored, kept))
    assert_same_bits(*(y[0] if isinstance(y, tuple) else y for y in (moved, expected)))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_no_float_weight(layer):
    model = fq.prepare(nn.Sequential(layer(16, 32)), "int4_weight_only", skip=[])
    floats = weakref.ref(model[0].weight_hh_l0)
    fq.store_codes(model)
    gc.collect()
    assert floats() is None
    for held in (model, fq.store_floats(model)):
        assert held[0].weight_hh_l0 is held[0].all_weights[0][1] is held[0]._flat_weights[1]


def test_what_a_backward_pass_has_yet_to_read_moves_as_floats_do():
    found = []
    for model in kept_and_stored():
        held = torch.optim.SGD(model.parameters())
        y = model(X)
        model.double()
        assert all(one.dtype is torch.float64 for one in held.param_groups[0]["params"])
        y.sum().backward()
        found.append(model[1].bias.grad)
    assert_same_bits(*found)


@pytest.mark.parametrize("preset", ["nf4_weight_only", "mxfp4", "gguf_q4_k"])
def test_values_have_the_strides_that_the_weight_says(preset):
    model = fq.store_codes(fq.prepare(nn.Sequential(nn.Conv1d(32, 32, 3)), preset, skip=[]))
    values = model[0].weight.values()
    assert values.stride() == model[0].weight.stride()
    assert_same_bits(torch.nn.utils.parameters_to_vector([model[0].weight]), values.flatten())


def test_a_part_that_its_layer_holds_stays_in_float_and_is_named():
    model = fq.prepare(nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64)), "int8_weight_only")
    with pytest.warns(UserWarning, match=r"stay in float: 0\.self_attn\.out_proj\.weight: a function or a submodule"):
        fq.store_codes(model)
    assert type(model[0].self_attn.in_proj_weight) is StoredWeight


def test_a_pattern_chooses_layers():
    model = fq.store_codes(fq.prepare(text(), "int4_group32", skip=[]), "1")
    assert [type(model[at].weight) is StoredWeight for at in (0, 1, 3)] == [False, True, False]
    assert [type(fq.store_floats(model, "3")[at].weight) is StoredWeight for at in (0, 1, 3)] == [False, True, False]
    with pytest.raises(ConfigError, match="no quantized weight matches 'head'"):
        fq.store_codes(model, "head")


def test_a_pattern_tells_of_weights_that_are_computed():
    """Also where there are no others, and for a pattern of their layer."""
    model = text()
    nn.utils.parametrizations.weight_norm(model[1])
    model = fq.prepare(model, "int8_weight_only", skip=[])
    with pytest.warns(UserWarning, match=r"^1 quantized weights stay in float: 1\.weight: it is computed"):
        fq.store_codes(model, "1")


@pytest.mark.parametrize("pattern", [None, ["1", "3"], 1])
@pytest.mark.parametrize(
    "use",
    [
        fq.store_codes,
        fq.store_floats,
        lambda model, pattern: fq.set_execution(model, "auto", pattern),
        lambda model, pattern: fq.calibrate(model, [X], pattern=pattern, progress=False),
    ],
)
def test_a_pattern_that_is_no_text_is_told(use, pattern):
    with pytest.raises(ConfigError, match=r"a pattern is one text, such as 'head' or 'blocks\.\*', got "):
        use(fq.prepare(text(), "int8", skip=[]), pattern)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_conversions(dtype):
    kept, stored = kept_and_stored()
    for convert in (lambda model: model.to(dtype), lambda model: model.float()):
        assert_same_bits(convert(stored)(X), convert(kept)(X))
        assert stored[1].weight.scale is stored[1].weight_quantizer.scale
    weight = stored.to("meta")[1].weight
    assert weight.device == weight.packed.device == weight.scale.device == torch.device("meta")


def test_precisions_of_calls():
    for dtype in (torch.float32, torch.float16):
        kept, stored = kept_and_stored(dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(stored(X), kept(X))
    with torch.inference_mode():
        assert_same_bits(stored(X), kept(X))
    with fq.nn.cached_weights(stored), torch.no_grad():
        assert_same_bits(stored(X), stored(X))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles(again):
    model = kept_and_stored(tied)[1]
    found = again(model)
    assert_same_bits(found(X), model(X))
    assert found[1].weight.scale is found[0].weight_quantizer.scale
    assert found[0].weight is found[1].weight


def test_codes_of_another_format_are_refused():
    """From a file that keeps the tensors alone, too, as those of safetensors do."""
    nf4, int4 = (kept_and_stored(config=preset)[1] for preset in ("nf4_weight_only", "int4_group64"))
    for given in (int4.state_dict(), dict(int4.state_dict())):
        file = io.BytesIO()
        torch.save(given, file)
        file.seek(0)
        state = torch.load(file)
        with pytest.raises(ConfigError, match=r"codes of 1\.weight are int4 .*, but the model stores codes of nf4"):
            nf4.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"the codes of 0\.weight are unknown, but the model stores codes of int8"):
        int4.load_state_dict({name: own for name, own in state.items() if not name.endswith("_spec")})


def tied():
    model = nn.Sequential(nn.Embedding(50, 128), nn.Linear(128, 50))
    model[1].weight = model[0].weight
    return model


def test_layers_that_share_a_weight_share_its_codes():
    kept, stored = kept_and_stored(tied)
    for convert in (lambda model: model, lambda model: model.bfloat16()):
        assert_same_bits(convert(stored)(X), convert(kept)(X))
        assert stored[0].weight is stored[1].weight
    floats = fq.store_floats(stored)
    assert floats[0].weight is floats[1].weight
    assert_same_bits(floats(X), kept(X))


def test_layers_that_share_a_weight_share_codes_that_its_dtype_rounds():
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    fq.calibrate(fq.prepare(model, fq.Config(fq.Rule(weight="int12 per_channel(0)"))))
    codes, x = torch.randint(-2047, 2048, (256, 256), dtype=torch.int16), torch.randn(3, 256, dtype=torch.bfloat16)
    for layer in model:
        layer.weight_quantizer.fix_codes(codes, layer.weight)
    assert model[0].weight_quantizer.needs_codes(model[0].weight)
    expected = model(x)
    assert_same_bits(fq.store_codes(model)(x), expected)


def test_a_state_dict_has_the_codes():
    stored = kept_and_stored()[1]
    assert [*stored.state_dict()][:3] == ["0.weight_codes", "0.weight_codes_spec", "0._weight_quantizer.scale"]
    file = io.BytesIO()
    torch.save(stored.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    torch.manual_seed(1)
    for options in ({}, {"assign": True}):
        other = fq.prepare(text(), "int4_group32", skip=[])
        fq.calibrate(other, [X], progress=False)
        other = fq.store_codes(other).bfloat16().float()
        assert not torch.equal(other(X), stored(X))
        other.load_state_dict(state, **options)
        assert_same_bits(other(X), stored(X))
    kept = fq.store_floats(copy.deepcopy(stored))
    with pytest.raises(RuntimeError, match=r"0\.weight is stored as codes in this state: call fakequant\.store_codes"):
        kept.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"stored as codes cannot be changed .* fakequant\.store_floats"):
        stored.load_state_dict(kept.state_dict())


@pytest.mark.parametrize("make", [text, tied])
@pytest.mark.parametrize("packed", [False, True])
def test_files_are_those_of_floats(packed, make, tmp_path):
    pytest.importorskip("safetensors")
    kept, stored = kept_and_stored(make)
    files = []
    for name, model in (("kept", kept), ("stored", stored)):
        fq.save(model, tmp_path / name, packed=packed)
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert files[0] == files[1]
    again = fq.load(make(), tmp_path / "stored")
    assert_same_bits(again(X), stored(X))
    assert_same_bits(fq.store_codes(again)(X), stored(X))


def test_delivered_files_are_those_of_floats(tmp_path):
    pytest.importorskip("safetensors")
    kept, stored = kept_and_stored()
    with pytest.warns(UserWarning, match=r"0\.weight in float"):
        folders = [fq.deliver(model, tmp_path / f"{id(model)}", "compressed-tensors") for model in (kept, stored)]
    one, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert one == other
    assert_same_bits(fq.store_codes(fq.read(folders[1], text()))(X), stored(X))


def test_what_looks_at_a_model_works():
    kept, stored = kept_and_stored()
    assert str(fq.summary(stored, X)) == str(fq.summary(kept, X))
    assert_same_bits(fq.float_state_dict(stored)["1.weight"], kept[1].weight)
    before = stored(X)
    fq.calibrate(stored, [X], progress=False)
    assert_same_bits(stored(X), before)
    with fq.disabled(stored):
        assert_same_bits(stored(X), before)
    baked = fq.bake_weights(stored)
    assert_same_bits(baked(X), before)
    assert not fq.nn.quantizers(baked)


def test_integer_execution():
    example = torch.randn(4, 32)
    kept, stored = kept_and_stored(lambda: nn.Sequential(nn.Linear(32, 8)), "int8", example=example)
    found = [fq.set_execution(model, "integer")(example) for model in (kept, stored)]
    assert_same_bits(*found)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: fq.qat.set_scales(model, fq.qat.Scales.LEARNED),
        lambda model: fq.ptq.improve(model, [X], progress=False),
        lambda model: fq.ir.capture(model, X),
        lambda model: fq.export_onnx(model, X, "never.onnx"),
    ],
)
def test_what_needs_floats_says_so(use):
    stored = kept_and_stored()[1]
    told = r"3 weights are stored as codes, the first is 0\.weight; call fakequant\.store_floats\(model\) before"
    with pytest.raises(ConfigError, match=told):
        use(stored)


def test_weights_cannot_be_written():
    stored = kept_and_stored()[1]
    for write in (
        lambda weight: weight.data.add_(1),
        nn.init.zeros_,
        lambda weight: weight.data.copy_(torch.zeros(256, 128)),
        lambda weight: setattr(weight, "data", torch.zeros(256, 128)),
        lambda weight: torch._foreach_add_([weight.data], 1.0),
    ):
        with pytest.raises(ConfigError, match=r"changed \((aten\.\w+|weight\.data =).*fakequant\.store_floats"):
            write(stored[1].weight)
    stored.requires_grad_()
    stored(X).sum().backward()
    with pytest.raises(ConfigError, match="cannot be changed"):
        torch.optim.SGD([stored[1].weight], 0.1).step()


def test_a_scale_that_was_set_anew_is_told():
    stored = kept_and_stored()[1]
    quantizer = stored[1].weight_quantizer
    quantizer.set_qparams(fq.QParams(2 * quantizer.scale))
    with pytest.raises(ConfigError, match=r"the scale of 1\._weight_quantizer was set anew"):
        stored(X)


def test_a_compiled_model_has_the_bits_of_a_compiled_one_with_floats():
    kept, stored = kept_and_stored()
    found = []
    for model in (kept, stored):
        x = model[0](X).detach().requires_grad_()
        y = torch.compile(model[1:], backend="aot_eager")(x)
        y.square().sum().backward()
        found += [y, x.grad]
    assert_same_bits(found[0], found[2])
    assert_same_bits(found[1], found[3])


@pytest.mark.parametrize("preset", ["mxfp4", "fp8", "nf4_weight_only", "nvfp4_weight_only"])
@pytest.mark.parametrize("is_first", [True, False])
def test_codes_of_floats_and_tables_are_decoded_in_a_compiled_model(preset, is_first):
    """The table of a format that was made while a model was traced was that of the trace, and stayed for all calls."""
    weight._table.cache_clear()
    model, x = fq.prepare(nn.Sequential(nn.Linear(64, 16)), preset), torch.randn(4, 64)
    fq.calibrate(model, [x], progress=False)
    fq.store_codes(model)
    before = None if is_first else model(x)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert_same_bits(found, model(x) if before is None else before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    found = []
    for model in kept_and_stored():
        x = model[0](X).detach().requires_grad_()
        torch.utils.checkpoint.checkpoint(model[1:], x, use_reentrant=reentrant).square().sum().backward()
        found.append(x.grad)
    assert_same_bits(*found)
