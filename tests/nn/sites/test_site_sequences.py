"""Calls belong to their quantizers by their order: another order than planned is an error, never another scale."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError, CoverageWarning, SiteError
from fakequant.model.config import TensorConfig
from fakequant.model.sites import SiteQuantizer, _made, site_plan
from tests.support.functional_models import Calls, assert_same_bits, only, quantized

pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")


class Loop(nn.Module):
    times = 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + x.sin()
        return x if self.times < 5 else x @ x


@pytest.mark.parametrize(
    ("times", "called"), [(1, "add"), (3, "add, add, add (so far)"), (5, "add, add, add (so far)")]
)
def test_loops_of_another_length_are_refused_with_both_sequences(times: int, called: str) -> None:
    x = torch.randn(4, 4)
    model = quantized(nn.Sequential(Loop()), x, rules=only("add"))
    model[0].times = times
    with pytest.raises(SiteError) as refused:
        model(x)
    assert "0 calls functions that have quantizers in another order" in str(refused.value)
    assert "planned: add, add\n" in str(refused.value)
    assert f"called:  {called}\n" in str(refused.value)
    model[0].times = 2
    model(x)  # the error has left nothing behind


class Branch(nn.Module):
    first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return torch.softmax(x + x.sin(), -1)
        return torch.softmax(x, -1) + x


def test_branches_are_refused() -> None:
    model = quantized(Branch(), torch.randn(2, 4), rules=only("add", "softmax"))
    model.first = False
    with pytest.raises(SiteError, match="planned: add, softmax\n  called:  softmax"):
        model(torch.randn(2, 4))


def test_functions_without_quantizers_may_come_as_they_like() -> None:
    model = quantized(Branch(), torch.randn(2, 4), rules=only("softmax"))
    model.first = False
    model(torch.randn(2, 4))


def test_other_operands_are_refused() -> None:
    model = quantized(
        Calls(lambda model, x, y: torch.cat([x + y])), torch.ones(4), torch.ones(4), rules=only("add", "cat")
    )
    with pytest.raises(SiteError, match="add has other operands than planned: float tensors are input, planned were"):
        model(torch.ones(4), 1.0)
    with pytest.raises(SiteError, match="other operands"):
        model(torch.ones(4), torch.ones(4).long())


def test_visits_with_different_sequences_are_left_in_float() -> None:
    other = Calls(lambda model, x, more: x + x + x if more else x + x)
    model = Calls(lambda model, x: model.other(model.other(x, True), False), other=other)
    with pytest.warns(
        CoverageWarning, match=r"other is called 2 times .* add, add; add\. These functions are left in float"
    ):
        fq.prepare(model, only("add"), example=torch.ones(2))
    assert type(model.other) is Calls


def test_branches_of_training_mode_in_called_modules() -> None:
    def trains(model: Any, x: Tensor) -> Tensor:
        y = x + x.cos()
        return y * model.extra(y) if model.training else y

    auxiliary = Calls(lambda model, x: x + x.sin())
    model = quantized(
        Calls(trains, extra=auxiliary), torch.randn(4), rules=fq.Config("", (fq.Rule("", input="int8", ops=("add",)),))
    )
    model.train()(torch.randn(4))


def test_symbolic_traces_are_refused() -> None:
    model = quantized(Loop(), torch.randn(4), rules=only("add"))
    with pytest.raises(SiteError, match=r"torch\.export"):
        torch.fx.symbolic_trace(model)


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.layer = False, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.always or torch.compiler.is_compiling() or torch.jit.is_tracing():
            places = torch.arange(3) + torch.zeros(1, dtype=torch.int64)
            x = x[places]
        return x + self.layer(x)


def test_calls_without_floats_are_not_counted() -> None:
    """Models of transformers compute masks in an export alone, and sizes are tensors while torch.jit traces."""
    x = torch.randn(3, 4)
    model = fq.prepare(Masks().eval(), "int8", x, target="onnxruntime")
    fq.calibrate(model, [x])
    expected = model(x)
    assert_same_bits([torch.jit.trace(model, (x,))(x), torch.export.export(model, (x,)).module()(x)], [expected] * 2)
    assert_same_bits([torch.compile(model, fullgraph=True, backend="eager")(x)], [expected])
    model.always = True
    assert_same_bits([model(x)], [expected])
    other = Masks().eval()
    other.always = True
    plan = str(site_plan(fq.prepare(other, "int8", x, target="onnxruntime")))
    assert plan == str(site_plan(model))
    assert plan.startswith("_sites.add_0: ")


class Trains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.training:
            x = x + torch.ones(4) * 100
            x = x * (x + 1.5).cos()
        else:
            x = x + x.sin()
        return x + self.head(x)


def test_calls_of_training_mode_never_get_the_scale_of_another() -> None:
    x = torch.randn(1, 4)
    with pytest.warns(CoverageWarning, match=r"also calls 2 x add, which stay in float and does not call add_0\. If"):
        model = fq.prepare(nn.Sequential(Trains()), only("add"), example=x)
    fq.calibrate(model, [x])
    owner, site = model[0], model[0]._sites
    plan = site_plan(model)
    assert (plan.steps, plan.training_keys) == ({"0": ("add", "add")}, {"0": ("add_", "add_", "add_1")})
    assert model.training
    assert not owner.norm.num_batches_tracked
    with torch.no_grad():
        for training in (False, True):
            owner.train(training)
            owner.norm.eval()
            y = owner.norm(x)
            if training:
                y = y + torch.ones(4) * 100
                y = y * (y + 1.5).cos()
            else:
                y = site.add_0.input(y) + site.add_0.other(y.sin())
            assert torch.equal(model(x), site.add_1.input(y) + site.add_1.other(owner.head(y)))


def test_sequences_of_training_mode_are_copied_and_stored(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    model = quantized(nn.Sequential(Trains()), x, rules=only("add"))
    fq.save(model, tmp_path)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fq.load(nn.Sequential(Trains()), tmp_path)]
    for made in copies:
        assert site_plan(made) == site_plan(model)
        assert_same_bits([made.train()(x)], [copy.deepcopy(model).train()(x)])
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(model).train(), fullgraph=True, backend="eager")
    assert_same_bits([compiled(x)], [copy.deepcopy(model).train()(x)])


class Rounds(nn.Module):
    """Leaves rounds out while it trains, as stochastic depth does."""

    kept = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            if not self.training or number in self.kept:
                x = x + x.sin() * number
        return x


def test_loops_that_are_shorter_in_training_mode_stay_in_float_there() -> None:
    x = torch.randn(2, 4)
    plain = Rounds()
    plain.kept = (0, 2)
    model = quantized(plain, x, rules=only("add"))
    assert site_plan(model).training_keys == {"": ("add_", "add_")}
    assert torch.equal(model.train()(x), plain.train()(x))
    model.kept = (1,)
    with pytest.raises(SiteError, match=r"planned: add, add \(in training mode\)\n  called:  add\n"):
        model(x)


def test_branches_that_are_drawn_in_training_mode_are_refused() -> None:
    x = torch.randn(2, 4)
    model = quantized(Rounds(), x, rules=only("add"))
    assert site_plan(model).training_keys == {}
    model.train()(x)
    model.kept = (1, 2)
    with pytest.raises(SiteError, match=r"planned: add, add, add\n  called:  add, add\n"):
        model(x)


def test_models_that_need_labels_in_training_mode() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            if self.training:
                return (x + x.sin() + labels).sum()
            return x + x.sin()

    model = quantized(Loss(), torch.ones(3), rules=only("add"))
    with pytest.raises(SiteError, match=r"planned: add\n  called:  add, add \(so far\)\n"):
        model.train()(torch.ones(3), torch.ones(3))
    assert model.eval()._sites.add_0.training is False


def test_a_compiled_loop_of_another_length_is_refused() -> None:
    x = torch.randn(4, 4)
    model = quantized(Loop(), x, rules=only("add"))
    model.times = 3
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"planned: add, add(\\n|\n) *called:  add, add, add \(so far\)"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize(("times", "called"), [(0, "none"), (1, "add")])
def test_a_checkpoint_whose_sites_vanished_is_refused_in_its_first_call(
    times: int, called: str, tmp_path: Path
) -> None:
    x = torch.randn(4, 4)
    fq.save(quantized(nn.Sequential(Loop()), x, rules=only("add")), tmp_path)
    plain = nn.Sequential(Loop())
    plain[0].times = times
    with pytest.raises(SiteError, match=rf"planned: add, add\n  called:  {called}\n"):
        fq.load(plain, tmp_path)(x)


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_submodule("renamed" if hasattr(self, "renamed") else "child")(x)


def test_a_renamed_child_keeps_its_sites_and_is_refused_in_a_checkpoint(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    model = quantized(Parent(Loop()), x, rules=only("add"))
    expected = model(x)
    fq.save(model, tmp_path)
    model.renamed = model.child
    del model.child
    assert_same_bits([model(x)], [expected])
    assert [site.path for site in site_plan(model).sites] == [
        "_sites.add_0",
        "renamed._sites.add_0",
        "renamed._sites.add_1",
    ]
    other = Parent(Loop())
    other.renamed = other.child
    del other.child
    with pytest.raises(CheckpointError, match=r"has modules that the model lacks: child"):
        fq.load(other, tmp_path)


def test_a_child_that_was_replaced_after_prepare_is_refused() -> None:
    x = torch.randn(4, 4)
    model = quantized(Parent(Loop()), x, rules=only("add"))
    model.child = Loop()
    with pytest.raises(SiteError, match=r"planned: add\n  called:  add, add \(so far\)\n"):
        model(x)


X = torch.linspace(-1, 1, 32).view(4, 8)


class Early(nn.Module):
    def __init__(self, finds: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.finds = finds

    def forward(self, x: Tensor) -> Tensor:
        return self.finds(x, x[x[:, 0] > 0])


def _matched(x: Tensor, found: Tensor) -> Tensor:
    return torch.cat([found, found]) + 1.0 * found.repeat(2, 1) if len(found) else found


def _scored(x: Tensor, found: Tensor) -> Tensor:
    y = (x + x.abs()).softmax(-1)
    return y if not len(found) else torch.cat([y, found])


def _exits(x: Tensor, found: Tensor) -> Tensor:
    y = (x + x.abs()) @ x.mT
    return y if not len(found) else (y @ x).softmax(-1)


@pytest.mark.parametrize("finds", [_matched, _scored])
def test_a_forward_may_return_early(finds: Any) -> None:
    model = fq.prepare(Early(finds).eval(), "int8", X, target="openvino")
    fq.calibrate(model, [X], progress=False)
    nothing = -X.abs()
    assert torch.allclose(model(nothing), Early(finds)(nothing), atol=0.1)


def test_calls_that_may_be_others_are_refused() -> None:
    model = fq.prepare(Early(_exits).eval(), "int8", X, target="openvino")
    fq.calibrate(model, [X], progress=False)
    with pytest.raises(SiteError, match=r"called:  add, matmul\n|called:  matmul\n"):  # which of the two products?
        model(-X.abs())


class Noting(nn.Module):
    """Writes a dict that outlives the call, a list or an attribute, as caches and counters do."""

    def __init__(self, note: Callable[[Any, int], object]) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        self.note(self, x.shape[0])
        return x + x.abs()


@pytest.mark.parametrize(
    "note",
    [
        lambda net, rows: net.seen.__setitem__("rows", rows),
        lambda net, rows: net.seen.update(rows=rows),
        lambda net, rows: vars(net).__setitem__("rows", rows) or net.seen.pop("rows", None),
    ],
)
def test_a_model_that_writes_a_dict_compiles(note: Any) -> None:
    model = fq.prepare(Noting(note).eval(), "int8", X, target="openvino")
    fq.calibrate(model, [X], progress=False)
    wanted = model(X)
    torch.compiler.reset()
    assert_same_bits(torch.compile(model, fullgraph=True, backend="eager")(X), wanted)


def test_quantizers_with_given_ranges_are_on_the_device_of_their_owner() -> None:
    planned = SiteQuantizer(TensorConfig(fq.QuantSpec("uint8"), False), fixed=(1 / 255, 0))
    made = _made(planned, "probabilities", {}, torch.device("meta"))
    assert [one.device.type for one in made.buffers()] == ["meta", "meta"]


class Resizing(nn.Module):
    """Resizes its table of positions in a trace, where it has the right size; may write to its input before."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.token, self.table = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x.mul_(2)
        table = self.table
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            first, others = table[:, :1], table[:, 1:]
            others = F.interpolate(others.transpose(1, 2), size=4, mode="nearest").transpose(1, 2)
            table = torch.cat([first, others], dim=1)
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + table


def prepared_resizing(writes: bool = False) -> tuple[nn.Module, Tensor]:
    x = torch.randn(2, 4, 8)
    rules = [fq.Rule("*", input="int8", ops=("cat", "add"))]
    model = fq.prepare(Resizing(writes).eval(), fq.Config("all", rules), example=x.clone())
    fq.calibrate(model, [x.clone()], progress=False)
    return model, x


def test_calls_with_parameters_alone_that_a_trace_alone_makes_are_not_counted() -> None:
    model, x = prepared_resizing()
    with torch.no_grad():
        expected = model(x)
        assert_same_bits([torch.jit.trace(model, (x,))(x)], [expected])
        program = torch.export.export(model, (x,), strict=False)
        assert_same_bits([program.module()(x)], [expected])
    program.graph.eliminate_dead_code()  # of the first try
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("fakequant.fake_quantize.default") == 4, targets


def test_a_forward_that_wrote_before_such_calls_is_refused() -> None:
    model, x = prepared_resizing(writes=True)
    with torch.no_grad(), pytest.raises(SiteError, match=r"planned: cat, add\n  called:  cat, cat \(so far\)"):
        torch.export.export(model, (x,), strict=False)


@torch.compile(backend="eager")
def compiled_part(x: Tensor) -> Tensor:
    return 1 - x


class Reflected(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        part = 1 - x if torch.compiler.is_compiling() else compiled_part(x)
        return part + x - 2 / x.exp()


@pytest.mark.parametrize("ops", [("add",), ("add", "sub", "div")])
def test_numbers_on_the_left_are_compiled(ops: tuple[str, ...]) -> None:
    torch.compiler.reset()
    x = torch.randn(2, 4)
    compiled_part(x)
    model = fq.prepare(Reflected(), fq.Config("some", (fq.Rule("*", input="int8", ops=ops),)), example=x)
    fq.calibrate(model, [x], progress=False)
    assert_same_bits([torch.compile(model, backend="eager", fullgraph=True)(x)], [model(x)])


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + x
        torch._dynamo.graph_break()
        return y * x


def test_a_graph_break_within_an_owner_is_refused_or_changes_nothing() -> None:
    torch.compiler.reset()
    x = torch.randn(2, 4)
    model = fq.prepare(Breaking(), fq.Config("some", (fq.Rule("*", input="int8", ops=("add", "mul")),)), example=x)
    fq.calibrate(model, [x], progress=False)
    # Refused; not so after control flow of torch in the process, which marks code that is not compiled from then on.
    with suppress(SiteError):
        assert_same_bits([torch.compile(model, backend="eager")(x)], [model(x)])
    assert torch._C._len_torch_function_stack() == 0


class OtherPath(nn.Module):
    def __init__(self, more: Callable[[Tensor], Tensor], before: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.more, self.before = nn.Linear(8, 8), nn.Linear(8, 8), more, before

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        is_traced = torch.compiler.is_compiling()
        q = self.q(x) + places
        q = self.more(q) if is_traced and self.before else q
        scores = q @ self.k(x).mT
        scores = self.more(scores) if is_traced and not self.before else scores
        return scores.softmax(-1) @ x


def queries() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 8, generator=generator), torch.randn(2, 4, 8, generator=generator)


MORE: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda scores: scores + torch.zeros(4, 4),
    "sums": lambda scores: scores + torch.zeros(1) + torch.zeros(4, 4),
    "product": lambda scores: scores @ torch.eye(4),
}


@pytest.mark.parametrize("more", [MORE["mask"], MORE["sums"]], ids=["mask", "sums"])
def test_functions_that_a_trace_alone_calls_stay_in_float(more: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, x = OtherPath(more, False).eval(), queries()
    fq.prepare(model, "int8", x, target="onnxruntime")
    fq.calibrate(model, [x])
    expected = model(*x)
    if more is MORE["mask"]:
        assert torch.equal(torch.export.export(model, x, strict=False).module()(*x), expected)
    path = fq.export_onnx(model, x, tmp_path / "m.onnx").path
    assert fq.verify_onnx(path, model, [x]).exact


@pytest.mark.parametrize(("more", "before"), [(MORE["product"], False), (MORE["mask"], True)], ids=["product", "sum"])
def test_calls_that_could_be_the_planned_ones_are_an_error_that_names_the_trace(
    more: Callable[[Tensor], Tensor], before: bool
) -> None:
    x = queries() if not before else (torch.randn(2, 4, 4), torch.randn(2, 4, 4))
    model = OtherPath(more, before).eval()
    if before:
        model.q, model.k = nn.Linear(4, 4), nn.Linear(4, 4)
    fq.prepare(model, "int8", x, target="onnxruntime")
    fq.calibrate(model, [x])
    with pytest.raises(SiteError, match=r"called: .* \(while it is traced, where forward may take another path"):
        torch.export.export(model, x, strict=False)
