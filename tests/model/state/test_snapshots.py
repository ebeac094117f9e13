"""A quantized model as data: functional weights, laziness, and what `apply` refuses."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError
from fakequant.model.state.weight_codes import QuantizedWeights
from fakequant.ops import library
from tests.support.checkpoints import assert_as_before, state_of

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(2))
BATCH = torch.randn(4, 16, generator=torch.Generator().manual_seed(6))
OPS = ("linear", "conv", "embedding", "matmul", "einsum", "bmm")


class Own(nn.Module):
    """A parameter that a function of the `forward` reads as a weight."""

    def __init__(self, shape: tuple[int, ...], call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(3)))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.w)


class FloatTwin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 8, generator=torch.Generator().manual_seed(4)))
        torch.manual_seed(5)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.embedding(x, self.table))


def linear() -> nn.Module:
    return Own((6, 8), F.linear)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "linear": (linear, X, "w"),
    "conv2d of a submodule": (lambda: nn.Sequential(Own((6, 4, 3, 3), F.conv2d)), IMAGES, "0.w"),
    "bmm": (lambda: Own((3, 8, 4), lambda x, w: torch.bmm(x[:, None], w)), X, "w"),
    "embedding beside a layer": (FloatTwin, torch.arange(12), "table"),
    "matmul": (lambda: Own((8, 4), torch.matmul), X, "w"),
    "einsum": (lambda: Own((2, 8, 3), lambda x, w: torch.einsum("bi,hio->bho", x, w)), X, "w"),
}


def prepared(make: Callable[[], nn.Module], x: Tensor, weight: str = "int4 per_channel(0)") -> Any:
    rule = fq.Rule("*", input="int8", weight=weight)
    config = fq.Config("", (rule, replace(rule, ops=OPS, optional=True)))
    with warnings.catch_warnings(action="ignore", category=fq.errors.CoverageWarning):
        model = fq.prepare(make(), config, example=x)
    fq.calibrate(model, [x], progress=False)
    return model


@pytest.mark.parametrize(
    "weight", ["int4 per_channel(0)", "uint8 per_tensor asymmetric", "float8_e4m3fn per_channel(0)"]
)
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_functions_are_packed_like_those_of_layers(name: str, weight: str, tmp_path: Path) -> None:
    make, x, path = MODELS[name]
    model = prepared(make, x, weight)
    with warnings.catch_warnings(action="error"):
        fq.save(model, tmp_path, packed=True)
        again = fq.load(make(), tmp_path)
    assert torch.equal(again(x), model(x))
    codes = fq.snapshot(model).weights[path]
    stored = next(tmp_path.glob("*.safetensors")).stat().st_size
    assert codes.shape == dict(make().named_parameters())[path].shape
    assert torch.equal(dict(again.named_parameters())[path], codes.values())
    fq.save(model, tmp_path / "plain")
    assert stored < next((tmp_path / "plain").glob("*.safetensors")).stat().st_size


def test_weights_that_no_codes_can_stand_for_are_named(tmp_path: Path) -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = prepared(lambda: nn.Sequential(normed, Own((8, 8), lambda x, w: F.linear(F.linear(x, w), w))), X)
    left = r"0\.weight: it is computed when the layer is called; 1\._sites\.linear_0\.weight: other functions"
    with pytest.warns(UserWarning, match=f"stores 3 of 3 quantized weights in float: {left}"):
        fq.save(model, tmp_path, packed=True)


@pytest.mark.parametrize("name", ["INT8", "INT4_GROUP32", "MXFP4", "NVFP4", "NF4_WEIGHT_ONLY", "FP8"])
def test_the_codes_are_those_of_the_quantizer(name: str) -> None:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(64, 64)), name)
    fq.calibrate(model, [torch.randn(4, 64)], progress=False)
    weight = fq.snapshot(model).weights["0.weight"]
    quantizer = model[0].weight_quantizer
    assert torch.equal(weight.values(), quantizer(model[0].weight))
    assert (weight.spec, weight.dtype, weight.shape) == (quantizer.spec, torch.float32, (64, 64))
    assert weight.codes.dtype is quantizer.spec.format.storage
    assert weight.quantizers == ("0._weight_quantizer",)


def many(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many codes of weights are alive each time that some are made."""
    made: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    encode = library.encode

    def watched(*args: Any) -> Tensor | None:
        counts.append(sum(one() is not None for one in made))
        codes = encode(*args)
        assert codes is not None
        made.append(weakref.ref(codes))
        return codes

    monkeypatch.setattr(library, "encode", watched)
    return counts


def test_a_save_never_holds_the_codes_of_two_weights(alive: list[int], tmp_path: Path) -> None:
    model = prepared(many, BATCH)
    alive.clear()
    fq.save(model, tmp_path, packed=True)
    assert len(alive) == 6  # once for each weight, when it is written
    assert max(alive) == 0


def test_offloaded_weights_are_streamed(alive: list[int], tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    x = torch.randn(4, 16)
    model, plain = prepared(many, x), prepared(many, x)
    fq.save(plain, tmp_path / "plain", packed=True)
    accelerate.disk_offload(model, str(tmp_path / "weights"), torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    alive.clear()
    fetched: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    for module in model.modules():
        hook: Any = vars(module).get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):
            if getattr(one, "weights_map", None) is not None:
                one.weights_map = Watched(one.weights_map, fetched, counts)
    fq.save(model, tmp_path / "moved", packed=True)
    assert max(alive) == 0
    assert max(counts) <= 1  # the look for stale scales compares each weight while the one before is there
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "moved" / path.name).read_bytes() == path.read_bytes()
    assert torch.equal(fq.load(many(), tmp_path / "moved")(x), plain(x))


class Watched(Mapping[str, Tensor]):
    """Tensors of a hook; counts how many that were given are alive at each access."""

    def __init__(self, held: Any, given: list[weakref.ref[Tensor]], counts: list[int]) -> None:
        self.held, self.given, self.counts = held, given, counts

    def __getitem__(self, name: str) -> Tensor:
        self.counts.append(sum(one() is not None for one in self.given))
        value = self.held[name].clone()
        self.given.append(weakref.ref(value))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, name: object) -> bool:
        return name in ("weight", "bias")


def test_a_snapshot_is_no_copy_and_makes_no_codes(alive: list[int]) -> None:
    model = prepared(many, BATCH)
    alive.clear()
    state = fq.snapshot(model)
    assert state.tensors["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert alive == []


def test_applied_snapshots_share_nothing() -> None:
    x = torch.randn(4, 16)
    model = prepared(many, x)
    again = fq.apply(many(), fq.snapshot(model))
    assert torch.equal(again(x), model(x))
    mine = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not mine & {tensor.data_ptr() for tensor in again.state_dict().values()}


def coded(change: Callable[[fq.WeightCodes], fq.WeightCodes] = lambda one: one, **fields: Any) -> fq.QuantizedState:
    """A state that has one weight as codes alone, and its scale nowhere else."""
    state = fq.snapshot(prepared(lambda: many(1), BATCH))
    tensors = {name: state.tensors[name] for name in state.others}
    weights = {name: change(state.weights[name]) for name in state.weights}
    return fq.QuantizedState.from_plan(state.plan, tensors, weights) if not fields else replace(state, **fields)


def test_quantizers_have_the_scales_of_codes() -> None:
    model = prepared(lambda: many(1), BATCH)
    again = fq.apply(many(1), coded())
    assert "0._weight_quantizer.scale" not in coded().tensors
    assert torch.equal(again[0].weight_quantizer.scale, model[0].weight_quantizer.scale)
    assert torch.equal(again[0].weight_quantizer(again[0].weight), model[0].weight_quantizer(model[0].weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: replace(w, codes=w.codes[:8]), r"0\.weight are of shape \[8, 16\], but the weight"),
        (lambda w: replace(w, codes=w.codes.float()), r"0\.weight are torch\.float32, but int4 has torch.int8"),
        (lambda w: replace(w, codes=w.codes + 20), r"codes of 0\.weight hold \d+, but the codes of int4 are -8 to 7"),
        (lambda w: replace(w, codes=w.codes - 20), r"codes of 0\.weight hold -\d+, but the codes of int4 are -8 to 7"),
        (lambda w: replace(w, scale=-w.scale), "_weight_quantizer cannot be used: scale must be a positive"),
        (lambda w: replace(w, scale=w.scale[:3]), r"scale has shape \[3, 1\]"),
        (lambda w: replace(w, zero_point=torch.zeros(16, 1, dtype=torch.int32)), "has a zero point, but .* symmetric"),
        (lambda w: replace(w, spec=fq.QuantSpec("int3", fq.PerChannel(0))), "as int3 .*: 0._weight_quantizer is int4"),
    ],
)
def test_codes_that_do_not_fit_are_refused_before_the_model_changes(change: Any, message: str) -> None:
    fresh = many(1)
    before = state_of(fresh)
    with pytest.raises(CheckpointError, match=message):
        fq.apply(fresh, coded(change))
    assert_as_before(fresh, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": {"9": {"type": "Linear", "quantizers": {}}}}, "layers that the model lacks: 9"),
        ({"layers": {"0": {"type": "Conv2d", "quantizers": {}}}}, "layer 0 is a Conv2d, the model's is a Linear"),
        ({"layers": {"0": {"kind": "Linear", "quantizers": {}}}}, r"the plan cannot be used: layers\.0 lacks type"),
        ({"layer": {}}, "the plan cannot be used: it has the unknown key 'layer'"),
        ({"shared": {"0.bias": "0.weight"}}, r"it lists 0\.bias as shared with 0\.weight, and also stores it"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    state, fresh = coded(), many(1)
    before = state_of(fresh)
    with pytest.raises(CheckpointError, match=message):
        fq.apply(fresh, fq.QuantizedState.from_plan({**state.plan, **change}, state.tensors, state.weights))
    assert_as_before(fresh, before)


def test_a_plan_survives_json() -> None:
    import json

    state = fq.snapshot(prepared(FloatTwin, torch.arange(12)))
    again = fq.QuantizedState.from_plan(json.loads(json.dumps(state.plan)), state.tensors)
    assert again.plan == state.plan
    assert (again.layers, again.sites) == (state.layers, state.sites)


class Alias(nn.Module):
    """One layer under several names, with a table that another layer shares where `tied`."""

    def __init__(self, names: tuple[str, ...], tied: bool) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        if tied:
            self.head.weight = self.a.weight
        for name in names:
            setattr(self, name, self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(self.a(x)))


@pytest.mark.parametrize("names", [("b",), ("b", "c"), ("z",)])
@pytest.mark.parametrize("tied", [False, True])
def test_one_layer_under_several_names_has_codes(names: tuple[str, ...], tied: bool) -> None:
    model = fq.prepare(Alias(names, tied), "INT4_WEIGHT_ONLY")
    state = fq.snapshot(model)
    assert not state.in_float
    assert {*state.weights} == ({"a.weight"} if tied else {"a.weight", "head.weight"})
    assert torch.equal(fq.apply(Alias(names, tied), state)(BATCH), model(BATCH))


@pytest.mark.parametrize("names", [(), ("b",)])
def test_a_float_layer_that_shares_a_weight_still_leaves_it_in_float(names: tuple[str, ...]) -> None:
    model = fq.prepare(Alias(names, True), "INT4_WEIGHT_ONLY", skip=["head"])
    (reason,) = fq.snapshot(model).in_float.values()
    assert reason.startswith("head" + "".join(f", {name}" for name in names) + " has the same weight and no quantizer")


def test_scales_are_found_once_while_the_weight_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    measure = library.measure
    monkeypatch.setattr(library, "measure", lambda x, granularity: calls.append(1) or measure(x, granularity))
    model = fq.prepare(nn.Sequential(nn.Linear(64, 32)), "INT4_GROUP32")
    weights = fq.snapshot(model).weights
    assert isinstance(weights, QuantizedWeights)
    scale = weights.params("0.weight").scale
    assert torch.equal(weights["0.weight"].scale, scale)
    assert len(calls) == 1
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(weights["0.weight"].scale, scale * 2)
    assert torch.equal(weights.params("0.weight").scale, scale * 2)
    assert len(calls) == 2
