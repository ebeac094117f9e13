"""A recorded run of models that write, keep, copy and change what others take for given."""

import copy
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CoverageWarning, FusionWarning
from fakequant.model.run.outputs import record, watching
from fakequant.model.run.recorded import find_neighbors

X = torch.linspace(-1, 1, 32).view(4, 8)


class Net(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.run = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def test_a_copy_that_a_model_makes_of_a_layer_while_it_is_calibrated_is_its_own() -> None:
    made: list[Any] = []

    def copies(net: Any, x: Tensor) -> Tensor:
        made.append(copy.deepcopy(net.a))
        return net.b(net.a(x)) + made[-1](x)

    net: Any = fq.prepare(Net(copies), "int8")
    fq.calibrate(net, [X], progress=False)
    before = made[0](X)
    with torch.no_grad():
        net.a.weight.zero_()
    assert "forward" not in vars(made[0])
    assert torch.equal(made[0](X), before)


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.exp_(),
        lambda y: y.masked_fill_(y > 0, 1.0),
        lambda y: y.__setitem__(0, 0.0) or y,
        lambda y: y.__iadd__(1.0),
        lambda y: nn.functional.relu(y, inplace=True),
        lambda y: nn.functional.hardtanh_(y),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_write_is_a_call_in_inference_mode_too(write: Callable[[Tensor], Tensor], inference: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.inference_mode(inference):
            return net.b(write(net.a(x)))

    net = Net(forward)
    recording = record(net, lambda: net(X))
    first, second = (call for call in recording.modules if call.path in ("a", "b"))
    assert second.inputs[0] != first.output


@pytest.mark.parametrize(
    "buffer",
    [torch.eye(8).to_sparse(), torch.tensor(torch.nan).expand(8), torch.empty(8, device="meta")],
    ids=["sparse", "expanded NaN", "meta"],
)
def test_buffers_that_nobody_writes_stay_untouched(buffer: Tensor) -> None:
    net = Net(lambda net, x: net.b(net.a(x).relu()))
    net.register_buffer("extra", buffer)
    record(net, lambda: net(X))
    assert [row.note for row in fq.ptq.equalize(net, X, "int8").pairs] != []
    assert net.extra is buffer


def test_buffers_that_a_run_writes_come_back() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.steps += 1
        return net.a(x)

    net = Net(forward)
    net.register_buffer("steps", torch.zeros(1))
    record(net, lambda: net(X))
    assert net.steps.item() == 0


def makes_parameter(net: Any, x: Tensor) -> Tensor:
    if not hasattr(net, "gain"):
        net.gain = nn.Parameter(torch.ones(8))
    return net.b(net.a(x) * net.gain)


def nests(net: Any, x: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor([x[:2], x])
    return net.b(net.a(nested.to_padded_tensor(0.0)[1]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("forward", [makes_parameter, nests])
def test_models_that_make_what_has_no_shape_or_no_name_are_calibrated(forward: Callable[[Any, Tensor], Any]) -> None:
    net: Any = fq.prepare(Net(forward), "int8")
    fq.calibrate(net, [X], progress=False)
    assert net.b._input_quantizer.calibrated


def test_a_normalisation_without_a_shape_stays() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d()).eval()
    with pytest.warns(FusionWarning, match="LazyBatchNorm1d"):
        fq.fuse_batch_norm(net, X)


def test_the_output_of_a_layer_is_what_its_hooks_leave() -> None:
    net = Net(lambda net, x: net.b(net.a(x)))
    net.a.register_forward_hook(lambda _, __, y: y.clamp(-1, 1))
    found = find_neighbors(net, record(net, lambda: net(X)), {net.a}, {net.b})
    assert found.readers == {net.a: [net.b]}


def keeps(net: Any, x: Tensor) -> Tensor:
    net.last = net.a(x)
    return net.norm(net.last)


@pytest.mark.parametrize("forward", [keeps, lambda net, x: SimpleNamespace(y=net.a(x), z=net.norm(net.a(x)))])
def test_what_the_model_keeps_or_gives_away_is_not_fused(forward: Callable[[Any, Tensor], Any]) -> None:
    net = Net(forward).eval()
    with pytest.warns(FusionWarning):
        fq.fuse_batch_norm(net, X)
    assert type(net.norm) is nn.BatchNorm1d


def test_a_norm_without_inputs_is_followed() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self) -> Tensor:
            return self.weight.exp()

    net = Net(lambda net, x: net.b(net.norm(net.a(x) * net.scale())))
    net.scale = Scale()
    assert str(fq.ptq.rotate(net, X))


def test_recordings_of_both_kinds_see_the_same_modules() -> None:
    net = Net(lambda net, x: net.b(net.norm(net.a(x))))
    whole = record(net, lambda: net(X))
    with watching(net) as light:
        net.eval()(X)
    assert [call.path for call in light.modules] == [call.path for call in whole.modules]
    assert all("forward" not in vars(module) for module in net.modules())


def test_a_read_within_vmap_is_one() -> None:
    net = Net(lambda net, x: net.b(net.norm(y := net.a(x))) + torch.vmap(torch.sin)(y)).eval()
    with pytest.warns(FusionWarning, match="used elsewhere"):
        fq.fuse_batch_norm(net, X)


def test_modules_in_other_threads_are_called_and_what_is_not_seen_is_said() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        results: list[Tensor] = []
        thread = Thread(target=lambda: results.append(net.a(x)))
        thread.start()
        thread.join()
        return net.b(results[0])

    net = fq.prepare(Net(forward), "int8")
    fq.calibrate(net, [X], progress=False)
    with pytest.warns(CoverageWarning, match="the model calls a in other threads"):
        found = fq.summary(net, X)
    assert [layer.state for layer in found.layers] == ["ready", "ready"]


def test_layers_that_ask_for_a_shape_alone_do_not_read() -> None:
    net = Net(lambda net, x: net.b(y := net.a(x).relu()) + torch.zeros_like(y) + x.to(y))
    found = find_neighbors(net, record(net, lambda: net(X)), {net.a}, {net.b})
    assert found.readers == {net.a: [net.b]}
    assert not found.elsewhere


def test_an_argument_besides_the_first_is_read_elsewhere() -> None:
    class Gated(nn.Linear):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return super().forward(x) * gate

    net = Net(lambda net, x: net.gated(net.a(x), net.b(x)))
    net.gated = Gated(8, 8)
    found = find_neighbors(net, record(net, lambda: net(X)), {net.a, net.b}, {net.gated})
    assert found.readers == {net.a: [net.gated]}
    assert found.elsewhere == {net.b}
