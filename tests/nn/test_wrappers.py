"""Names of torch's wrappers are in no file, path or message: the functions on models look inside."""

import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.optim.swa_utils import AveragedModel

import fakequant as fq
from tests.support.bits import assert_same_bits

X = torch.linspace(-1, 1, 32).view(4, 8)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4))


def part_compiled(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPERS = {
    "compile": compiled,
    "compiled part": part_compiled,
    "compiled part in a compiled model": lambda model: compiled(part_compiled(model)),
    "data parallel": nn.DataParallel,
    "average": AveragedModel,
    "compiled data parallel": lambda model: compiled(nn.DataParallel(model)),
    "distributed": nn.parallel.DistributedDataParallel,
}


@pytest.fixture(params=WRAPPERS)
def wrap(request, tmp_path):
    if request.param == "distributed":
        init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield WRAPPERS[request.param]
    if request.param == "distributed":
        destroy_process_group()


def prepared(model):
    fq.prepare(model, "int8", rules={"0.0": "int4_group32"})
    fq.calibrate(model, [X], progress=False, group=False)
    return model


def test_a_file_of_a_wrapped_model_loads_into_any(wrap, tmp_path):
    plain = prepared(net())
    model = prepared(wrap(net()))
    fq.save(model, tmp_path / "file")
    assert "_orig_mod" not in (tmp_path / "file" / "fakequant.json").read_text()
    again = fq.load(net(), tmp_path / "file")
    assert list(again.state_dict()) == list(plain.state_dict())
    other = wrap(net())
    assert fq.load(other, fq.save(plain, tmp_path / "plain")) is other
    for one in (again, other, model):
        assert_same_bits(one(X), plain(X))


def test_every_function_names_layers_as_those_of_the_model(wrap, tmp_path):
    plain = prepared(net())
    model = net()
    wrapped = wrap(model)
    assert fq.prepare(wrapped, "int8", rules={"0.0": "int4_group32"}) is wrapped
    used = fq.calibrate(wrapped, [X], progress=False, pattern="*")
    assert list(used) == list(fq.calibrate(plain, [X], progress=False))
    assert list(fq.recalibrate(wrapped, used, "max")) == list(fq.recalibrate(plain, method="max"))
    assert str(fq.summary(wrapped, X)) == str(fq.summary(plain, X))
    assert str(fq.sensitivity(wrapped, [X], progress=False)) == str(fq.sensitivity(plain, [X], progress=False))
    assert list(fq.float_state_dict(wrapped)) == list(net().state_dict())
    found = fq.ptq.improve(wrapped, [X], progress=False, **({"group": False} if "Dist" in str(type(wrapped)) else {}))
    assert [layer.layer for layer in found.layers] == ["0.0", "1"]


def test_an_error_leaves_the_wrappers(tmp_path):
    model = part_compiled(net())
    with pytest.raises(fq.FakeQuantError, match="no quantizers"):
        fq.save(model, tmp_path)
    assert type(model[0]).__name__ == "OptimizedModule"
