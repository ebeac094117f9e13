"""Tensors whose elements share memory get a place for each element before they are written; other strides stay."""

import copy

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.data.again import same_bits
from fakequant.errors import CalibrationWarning
from fakequant.memory import separate
from fakequant.restore import restore_after, state_of
from tests.support.interruption import state

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
IMAGES = torch.randn(4, 6, 8, 8, generator=torch.Generator().manual_seed(4))

LAYOUTS = {  # each of a weight of 12 rows and 6 columns
    "expanded rows": lambda: torch.randn(1, 6).expand(12, 6),
    "expanded columns": lambda: torch.randn(12, 1).expand(12, 6),
    "one number": lambda: torch.randn(1).expand(12, 6),
    "windows": lambda: torch.randn(17).unfold(0, 6, 1),
    "as_strided": lambda: torch.randn(41).as_strided((12, 6), (3, 1), 2),
}
APART = {
    "transposed": lambda: torch.randn(6, 12).t(),
    "columns": lambda: torch.randn(12, 9)[:, 2:8],
    "steps": lambda: torch.randn(116).as_strided((12, 6), (5, 12)),
}


def linear(view):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    model[0].weight = nn.Parameter(view())
    model[0].bias = nn.Parameter(torch.randn(1).expand(12))
    return model


def convolution(view):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 6, 1)).eval()
    model[0].weight = nn.Parameter(view()[:, :, None, None].expand(12, 6, 3, 3))
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    return model


def prepared(model, x):
    return fq.calibrate(fq.prepare(model, "INT8"), [x], progress=False) and model


def loaded(model, x, folder):
    fq.save(prepared(copy.deepcopy(model), x), folder / "saved")
    fq.load(model, folder / "saved")


DO = {
    "improve": lambda model, x, _: fq.ptq.improve(prepared(model, x), [x], "best", progress=False),
    "bake_weights": lambda model, x, _: fq.bake_weights(prepared(model, x)),
    "reconstruct": lambda model, x, _: fq.ptq.reconstruct(prepared(model, x), [x], iterations=2, progress=False),
    "equalize": lambda model, x, _: fq.ptq.equalize(model, x, "INT8"),
    "fuse_batch_norm": lambda model, x, _: fq.fuse_batch_norm(model, x),
    "load": loaded,
}


@pytest.mark.parametrize("do", DO.values(), ids=DO)
@pytest.mark.parametrize(
    ("make", "layout"),
    [(linear, one) for one in (*LAYOUTS, *APART)] + [(convolution, "expanded columns"), (convolution, "as_strided")],
)
def test_a_weight_whose_elements_share_memory_is_written_as_any_other(make, layout, do, tmp_path):
    x = X if make is linear else IMAGES
    model = make((LAYOUTS | APART)[layout])
    plain, held, strides = copy.deepcopy(model), model[0].weight, model[0].weight.stride()
    for one in (plain, model):
        do(one, x, tmp_path)
    assert all(map(same_bits, model.state_dict().values(), plain.state_dict().values()))
    assert same_bits(model(x), plain(x))
    assert model[0].weight is held
    assert layout in LAYOUTS or held.stride() == strides


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_leaves_such_a_weight_as_it_was(layout, monkeypatch):
    def fail(*given):
        raise KeyboardInterrupt

    model = prepared(linear(LAYOUTS[layout]), X)
    before = state(model)
    monkeypatch.setattr("fakequant.ptq.improvement.raise_scales", fail)
    with pytest.raises(KeyboardInterrupt):
        fq.ptq.improve(model, [X], progress=False)
    assert state(model) == before


def test_codes_are_given_to_such_a_weight():
    model = prepared(linear(LAYOUTS["expanded rows"]), X)
    codes = torch.arange(72, dtype=torch.int8).reshape(12, 6)
    quantizer = model[0]._weight_quantizer
    quantizer.fix_codes(codes, model[0].weight)
    assert torch.equal(model[0].weight, codes * quantizer.qparams(codes).scale)


def test_equal_views_stay_tied_and_other_strides_stay():
    row = torch.randn(1, 6)
    one, other = (nn.Parameter(row.expand(12, 6)) for _ in range(2))
    apart = [nn.Parameter(make()) for make in APART.values()]
    strides = [x.stride() for x in apart]
    separate([one, other, *apart])
    with torch.no_grad():
        one[0] = 3.0
    assert torch.equal(one, other)
    assert not torch.equal(one[0], one[1])
    assert [x.stride() for x in apart] == strides


class Counts(nn.Module):
    """A buffer, its view with more elements, and a forward that writes the buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("counts", self.count.expand(6))

    def forward(self, x):
        self.count.add_(1)
        return self.fc(x) * self.counts


def test_a_view_of_a_buffer_that_a_forward_writes_stays_a_view():
    model = Counts()
    with restore_after(state_of([model])):
        model(X)
        assert model.counts.tolist() == [1.0] * 6
    assert (model.count.item(), model.counts.tolist()) == (0.0, [0.0] * 6)
    with pytest.warns(CalibrationWarning, match="changes its state in a run"):
        fq.ptq.improve(prepared(model, X), [X], progress=False)
    assert (model.count.item(), model.counts.tolist()) == (0.0, [0.0] * 6)
    model(X)
    assert model.counts.tolist() == [1.0] * 6


def test_statistics_that_share_memory_are_estimated():
    model = convolution(APART["columns"])
    model[1].running_mean, model[1].running_var = torch.zeros(1).expand(12), torch.ones(1).expand(12)
    plain = copy.deepcopy(model)
    for one in (model, plain):
        fq.ptq.reestimate_batch_norm(prepared(one, IMAGES), [IMAGES])
    assert torch.equal(model[1].running_mean, plain[1].running_mean)
    assert len(model[1].running_mean.unique()) == 12
