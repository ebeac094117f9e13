"""Batch normalisations that are folded into the layers before them, found by data flow."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError, FusionWarning
from fakequant.model.training.fuse import find_fusions
from fakequant.nn.quantized.folded import FusedBatchNorm
from tests.support.norms import FrozenNorm, FrozenNormAct, NormAct

NOT_DIRECT = "its input is not the output of a convolution or linear layer"
ELSEWHERE = "the output or a parameter of the layer before it is used elsewhere, too"
NEVER = "it is never called"


def trained(model: nn.Module) -> nn.Module:
    """A model in eval mode whose batch normalisations do something."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.2, 3.0)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval()


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), (5, 6)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8)), (2, 6, 9)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)), (2, 6, 7, 5)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(6, 8, 2, groups=2), nn.BatchNorm3d(8)), (2, 6, 4, 4, 4)),
    "transposed 1d": (lambda: nn.Sequential(nn.ConvTranspose1d(6, 8, 3), nn.BatchNorm1d(8)), (2, 6, 9)),
    "transposed 2d": (lambda: nn.Sequential(nn.ConvTranspose2d(6, 8, 3, 2, groups=2), nn.BatchNorm2d(8)), (2, 6, 5, 5)),
    "transposed 3d": (lambda: nn.Sequential(nn.ConvTranspose3d(6, 9, 2, groups=3), nn.BatchNorm3d(9)), (1, 6, 3, 3, 3)),
    "no affine": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8, affine=False)), (2, 6, 7, 5)),
    "synchronised": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3), nn.SyncBatchNorm(8)), (2, 6, 7, 5)),
}


@pytest.mark.parametrize("given", [False, True], ids=["traced", "example"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_keeps_its_output(name: str, given: bool) -> None:
    make, shape = LAYERS[name]
    model, x = trained(make()).double(), torch.randn(shape, dtype=torch.float64)
    before, parameters = model(x), set(model[0].parameters())  # type: ignore[index]
    with warnings.catch_warnings(action="error"):
        assert fq.fuse_batch_norm(model, x if given else None) is model
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    assert parameters <= set(model[0].parameters())  # type: ignore[index]
    assert isinstance(model[1], FusedBatchNorm)  # type: ignore[index]
    state = copy.deepcopy(model.state_dict())
    fq.fuse_batch_norm(model, x if given else None)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_the_fused_model_can_be_prepared_copied_and_exported() -> None:
    model, x = trained(LAYERS["conv2d"][0]()), torch.randn(2, 6, 7, 5)
    fq.fuse_batch_norm(model, x)
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert [str(node) for node in torch.fx.symbolic_trace(model).graph.nodes] == ["input_1", "_0", "_1", "output"]
    fq.calibrate(fq.prepare(model, "int8"), [x])
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), model(x))


class Block(nn.Module):
    """Layers of which `forward` decides what follows what; names say nothing."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], traces: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.c, self.d = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.run, self.traces = forward, traces

    def forward(self, x: Tensor) -> Tensor:
        if not self.traces and bool(x.sum() > 1e9):  # torch.fx cannot know
            return x
        return self.run(self, x)


def read_weight(m: Any, x: Tensor) -> Tensor:
    return m.c(m.a(x)) + nn.functional.conv2d(x, m.a.weight, padding=1)


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.c(y) + y.mul_(2)


FLOWS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, str], dict[str, str]]] = {
    "crossed": (lambda m, x: m.c(m.b(torch.relu(m.d(m.a(x))))), {"c": "b", "d": "a"}, {}),
    "residual": (lambda m, x: x + m.d(m.b(torch.relu(m.c(m.a(x))))), {"c": "a", "d": "b"}, {}),
    "called twice": (
        lambda m, x: m.c(m.a(m.a(x))) + m.d(m.b(x)),
        {"d": "b"},
        {"c": "the layer before it is called 2 times"},
    ),
    "two readers": (lambda m, x: m.c(m.a(x)) + m.d(x), {"c": "a"}, {"d": NOT_DIRECT}),
    "output used": (lambda m, x: (lambda y: m.c(y) + y)(m.a(x)), {}, {"c": ELSEWHERE, "d": NEVER}),
    "output changed later": (in_place, {}, {"c": ELSEWHERE, "d": NEVER}),
    "read by two": (lambda m, x: (lambda y: m.c(y) + m.d(y))(m.a(x)), {}, {"c": ELSEWHERE, "d": ELSEWHERE}),
    "weight read": (read_weight, {}, {"c": ELSEWHERE, "d": NEVER}),
    "normalised twice": (lambda m, x: m.c(m.c(m.a(x))) + m.d(m.b(x)), {"d": "b"}, {"c": "it is called 2 times"}),
    "two in a row": (lambda m, x: m.d(m.c(m.a(x))), {"c": "a"}, {"d": NOT_DIRECT}),
}


@pytest.mark.parametrize("traces", [True, False], ids=["traced", "run"])
@pytest.mark.parametrize("name", FLOWS)
def test_layers_are_found_by_data_flow(name: str, traces: bool) -> None:
    forward, fused, left = FLOWS[name]
    model, x = trained(Block(forward, traces)).double(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    before = model(x)
    found = find_fusions(model, x)
    assert (found.fused, found.left) == (fused, left)
    with warnings.catch_warnings(record=True, action="always") as said:
        fq.fuse_batch_norm(model, x)
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    assert [w.category for w in said] == [FusionWarning] * bool(left)
    assert not left or f"{len(fused)} fused, {len(left)} batch" in str(said[0].message)
    assert not left or said[0].filename == __file__


def test_an_untraceable_model_needs_an_example() -> None:
    model = trained(Block(lambda m, x: m.c(m.a(x)), traces=False))
    state = copy.deepcopy(vars(model))
    with pytest.raises(ConfigError, match=r"torch.fx cannot trace the model \(TraceError: .*give an example"):
        fq.fuse_batch_norm(model)
    assert vars(model).keys() == state.keys()


def other(change: Callable[[nn.Sequential], object]) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    change(model)
    return trained(model)


def set_module(name: str, module: nn.Module) -> Callable[[nn.Sequential], object]:
    return lambda model: setattr(model, name, module)


class Clipped(nn.BatchNorm2d):
    """Computes something else of large values alone."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(max=6)


class Added(nn.BatchNorm2d):
    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        y = super().forward(input)
        return y if residual is None else y + residual


class Moving(nn.BatchNorm2d):
    """Changes itself, and stops on other sizes than its own."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        self.running_mean.mul_(0.9)
        assert input.shape[-1] < 5
        return super().forward(input)


class OtherFrozen(nn.Module):
    """Has the tensors of a batch normalisation, and computes something else."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.ones(channels))
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.zeros(channels))

    def forward(self, input: Tensor) -> Tensor:
        return input.abs()


@pytest.mark.parametrize(
    "make",
    [
        lambda: NormAct(4, nn.ReLU(inplace=True)),
        lambda: NormAct(4, nn.PReLU(4)),
        lambda: FrozenNorm(4),
        lambda: FrozenNormAct(4),
        lambda: pytest.importorskip("timm").layers.BatchNormAct2d(4, act_layer=nn.Hardswish),
    ],
    ids=["relu", "prelu", "frozen", "frozen-act", "timm"],
)
def test_normalisations_of_other_libraries_are_fused_and_what_follows_them_stays(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    norm = make()
    for name in ("running_mean", "bias"):
        getattr(norm, name).data.normal_()
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm, nn.Conv2d(4, 2, 1)).eval(), torch.randn(2, 3, 6, 6)
    before, kept = model(x), {name for name, _ in model.named_modules() if name.endswith(("act", "drop"))}
    fq.fuse_batch_norm(model, x)
    torch.testing.assert_close(model(x), before)
    assert kept <= {name for name, _ in model.named_modules()}
    inner = model[1][0] if kept else model[1]
    assert str(inner) == "FusedBatchNorm(into 0, inputs of 4 axes)"


def tie(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


LEFT: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "no statistics": (set_module("1", nn.BatchNorm2d(4, track_running_stats=False)), "no running statistics"),
    "tied": (tie, "shares a parameter with another module"),
    "weight_norm": (lambda m: nn.utils.parametrizations.weight_norm(m[0]), "the weight of the layer before it is comp"),
    "pruned": (lambda m: nn.utils.prune.random_unstructured(m[0], "weight", 0.5), "the weight of the layer before it"),
    "hook on the layer": (lambda m: m[0].register_forward_hook(lambda *_: None), "the layer before it has hooks"),
    "hook on itself": (lambda m: m[1].register_forward_hook(lambda *_: None), "it has hooks or a forward of its own"),
    "another range": (set_module("1", Clipped(4)), "a Clipped may compute something else"),
    "two inputs": (set_module("1", Added(4)), "a Added takes more than one input"),
    "raises": (set_module("1", Moving(4)), "a Moving may compute something else"),
    "tensors of one": (set_module("1", OtherFrozen(4)), "a OtherFrozen may compute something else"),
    "other channels": (set_module("1", nn.BatchNorm2d(5)), "it has 5 channels, and the layer before it 4"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_fused_stays_and_is_named(name: str) -> None:
    change, why = LEFT[name]
    model = other(change)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.warns(FusionWarning, match=rf"^0 fused, 1 batch normalisation stays: 1 \(.*{why}"):
        fq.fuse_batch_norm(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_training_mode_and_prepared_models_are_refused() -> None:
    model = other(lambda _: None)
    model[1].train()  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"training mode, the first is 1; call model.eval\(\)"):
        fq.fuse_batch_norm(model)
    with pytest.raises(ConfigError, match=r"call it before fakequant.prepare"):
        fq.fuse_batch_norm(fq.prepare(model.eval(), "int8"))


def test_linear_layers_over_sequences_are_refused_when_they_are_called() -> None:
    """A BatchNorm1d of [n, length, features] normalises the length, not the features of the layer."""
    model, x = trained(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), torch.randn(2, 4, 4)
    before = model(x)
    with pytest.raises(ConfigError, match=r"of shape \[2, 4, 4\], and expected 2 axes"):
        fq.fuse_batch_norm(model, x)
    assert torch.equal(model(x), before)  # nothing was changed
    fq.fuse_batch_norm(model)
    with pytest.raises(ConfigError, match=r"of shape \[2, 4, 4\], and expected 2 axes"):
        model(x)


def test_outputs_that_change_are_refused_and_nothing_is_changed() -> None:
    class Looks(nn.Module):
        """Asks a module for its class, which neither a graph nor a run shows."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) * (2 if isinstance(self.norm, nn.BatchNorm2d) else 1)

    model, x = trained(Looks()), torch.randn(2, 4, 6, 6)
    before, state = model(x), {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"output 0 of the model changed by .*nothing was changed"):
        fq.fuse_batch_norm(model, x)
    assert torch.equal(model(x), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_optional_arguments_are_at_their_defaults() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.a(x)
            return self.c(y) if mask is None else y * mask

    model, x = trained(Masked(lambda m, x: x, traces=True)), torch.randn(2, 4, 6, 6)
    assert find_fusions(model, (x, "label"), inputs=0).fused == {"c": "a"}
    assert find_fusions(model).fused == {"c": "a"}


def test_nested_and_shared_modules_are_replaced_under_all_their_names() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), nn.ReLU())
            self.alias = self.inner[0][1]

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = trained(Shared())
    fq.fuse_batch_norm(model)
    assert model.alias is model.inner[0][1]
    assert isinstance(model.alias, FusedBatchNorm)


class _Same(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias, self.stride, 0, 1, self.groups)


class _ByChild(nn.Conv2d):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pad = nn.ZeroPad2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.pad(x))


class _Turned(nn.ConvTranspose2d):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.contiguous())


class _Row(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * 2, self.weight, self.bias)


class _Scaled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _WithoutBias(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight)


@pytest.mark.parametrize(
    ("make", "taken"),
    [
        *(
            (lambda cls=cls, n=n: cls(4, 8, 3, groups=n, bias=False), 1)
            for cls in (_Same, _ByChild, _Turned)
            for n in (1, 4)
        ),
        (lambda: _Row(4, 8, bias=False), 1),
        (lambda: _Scaled(4, 8, 3, bias=False), 0),
        (lambda: _WithoutBias(4, 8, 3, bias=False), 0),
    ],
)
def test_subclasses_whose_own_forward_ends_in_one_product(make: Any, taken: bool) -> None:
    torch.manual_seed(0)
    is_row = isinstance(layer := make(), _Row)
    model = nn.Sequential(layer, nn.BatchNorm1d(8) if is_row else nn.BatchNorm2d(8), nn.ReLU())
    shape = (4,) if is_row else (4, 6, 6)
    model(torch.randn(8, *shape))
    model, x = model.eval(), torch.randn(2, *shape)
    wanted = model(x)
    assert [*find_fusions(model, x).fused] == (["1"] if taken else [])
    assert find_fusions(model).fused == {}  # without a run
    assert model[0].bias is None
    with warnings.catch_warnings(action="ignore"):
        torch.testing.assert_close(fq.fuse_batch_norm(model, x)(x), wanted)
