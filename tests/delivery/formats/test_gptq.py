"""GPTQ's files: codes, zero points and values against an expression of numpy, and `desc_act`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import fakequant as fq
from fakequant.errors import CheckpointError, ExportError
from tests.support.quantized_folders import COLUMNS, GROUPS, ROWS, SIZE, X, gptq, net, random_codes, read, write


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_codes_and_values_are_those_of_the_file(tmp_path: Path, bits: int, version: int) -> None:
    tensors, config, values = gptq(bits, version)
    codes, points, scales = map(torch.from_numpy, random_codes(bits, GROUPS))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = read(write(tmp_path, tensors, config), net(dtype))
        assert torch.equal(model[0].weight, values.to(dtype))
        assert str(model[0].weight_quantizer.spec) == f"uint{bits} per_block(-1:32) scale=float16"
        held = fq.snapshot(model).weights["0.weight"]
        assert torch.equal(held.codes.long(), codes)
        assert held.zero_point is not None
        assert torch.equal(held.zero_point.long(), points)
        assert torch.equal(held.scale, scales.float())


@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_codes_are_signed(tmp_path: Path, version: int) -> None:
    tensors, config, values = gptq(4, version, sym=True)
    model = read(write(tmp_path, tensors, config))
    assert str(model[0].weight_quantizer.spec) == "int4 per_block(-1:32) scale=float16"
    assert torch.equal(model[0].weight, values)


@pytest.mark.parametrize("said", [1, 2])
def test_a_wrong_version_is_seen_by_symmetric_codes(tmp_path: Path, said: int) -> None:
    tensors, config, values = gptq(4, 3 - said, sym=True)
    config["checkpoint_format"] = "gptq_v2" if said == 2 else "gptq"
    with pytest.warns(UserWarning, match=f"says that its zero points have version {said}"):
        model = read(write(tmp_path, tensors, config))
    assert torch.equal(model[0].weight, values)


def scattered() -> np.ndarray:
    return np.random.default_rng(1).permutation(COLUMNS) // SIZE


def test_desc_act_is_an_order_of_inputs(tmp_path: Path) -> None:
    tensors, config, values = gptq(index=scattered(), desc_act=True)
    model = read(write(tmp_path, tensors, config))
    order = torch.from_numpy(np.argsort(scattered(), kind="stable"))
    assert torch.equal(model[0].weight, values[:, order])
    assert torch.equal(model[0](X), linear(X[:, order], values[:, order], model[0].bias))
    again = fq.load(net(), fq.save(model, tmp_path / "ours.safetensors") or tmp_path / "ours.safetensors")
    assert torch.equal(again(X), model(X))
    with pytest.raises(ExportError, match="its input goes through a permutation"):
        fq.deliver(model, tmp_path / "new", "compressed-tensors")


def test_groups_of_other_sizes_are_groups_of_one_input(tmp_path: Path) -> None:
    index = np.minimum(np.arange(COLUMNS) // 20, GROUPS - 1)
    tensors, config, values = gptq(index=index, desc_act=True)
    with pytest.warns(UserWarning, match="becomes a group, with the same values"):
        model = read(write(tmp_path, tensors, config))
    assert torch.equal(model[0].weight, values)
    assert "per_block(-1:1)" in str(model[0].weight_quantizer.spec)


def test_a_plain_index_and_none_are_the_same(tmp_path: Path) -> None:
    tensors, config, values = gptq()
    del tensors["g_idx"]
    model = read(write(tmp_path, tensors, config))
    assert torch.equal(model[0].weight, values)
    assert model[0].input_transform is None


def test_layers_of_their_own_groups(tmp_path: Path) -> None:
    tensors, config, values = gptq(group_size=128, dynamic={"+:0": {"group_size": SIZE}})
    assert torch.equal(read(write(tmp_path, tensors, config))[0].weight, values)


def test_a_folder_of_2023(tmp_path: Path) -> None:
    """AutoGPTQ wrote the configuration and the tensors under other names, and zero points minus one."""
    tensors, config, values = gptq(4, 1)
    path = write(tmp_path, tensors, {})
    (path / "model.safetensors").rename(path / "gptq_model-4bit-32g.safetensors")
    own = {key: config[key] for key in ("bits", "group_size", "sym")} | {"desc_act": False, "true_sequential": True}
    (path / "quantize_config.json").write_text(json.dumps(own))
    assert torch.equal(read(path)[0].weight, values)
    (path / "quantize_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"quantize_config\.json holds a list, not an object"):
        read(path)
    (path / "quantize_config.json").write_text(json.dumps(own))
    (path / "other.safetensors").write_bytes((path / "gptq_model-4bit-32g.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        read(path)


def analysed(model: Any) -> None:
    assert fq.sensitivity(model, [X], progress=False)
    assert fq.ptq.improve(model, [X], steps=["bias"], progress=False)


def trained(model: Any) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model(X).square().mean().backward()
    optimizer.step()
    assert model(X).isfinite().all()


@pytest.mark.parametrize("goes_on", [analysed, trained])
@pytest.mark.parametrize("index", [None, scattered()], ids=["plain", "desc_act"])
def test_work_goes_on_from_the_codes(tmp_path: Path, goes_on: Callable[[Any], None], index: np.ndarray | None) -> None:
    tensors, config, _ = gptq(index=index)
    goes_on(read(write(tmp_path, tensors, config), net()))


def test_codes_go_on_into_compressed_tensors(tmp_path: Path) -> None:
    tensors, config, values = gptq()
    model = read(write(tmp_path / "gptq", tensors, config))
    with pytest.warns(UserWarning, match="dequantize=True"):
        path = fq.deliver(model, tmp_path / "ct", "compressed-tensors")
    again = read(path)
    assert torch.equal(again[0].weight, values)
    ours, theirs = (fq.snapshot(one).weights["0.weight"].codes for one in (model, again))
    assert torch.equal(ours.long(), theirs.long() + 8 if theirs.dtype is torch.int8 else theirs.long())
    with pytest.raises(
        ExportError, match="reads files of gptq, but does not write them; deliver the model as compressed"
    ):
        fq.deliver(model, tmp_path / "new", "gptq")


def change(key: str, how: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda tensors, config: tensors.update({key: how(tensors[key])})


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], Any], str]] = {
    "cut": (change("qweight", lambda x: x[:, :-1]), "of 0, qweight is torch.int32 of shape"),
    "cut rows": (change("qweight", lambda x: x[:1]), "qweight has 1 words for 96 inputs, which is not 2 to 8 bits"),
    "no scales": (lambda tensors, config: tensors.pop("scales"), "lacks 0.scales"),
    "no points": (lambda tensors, config: tensors.pop("qzeros"), "lacks 0.qzeros"),
    "float codes": (change("qweight", Tensor.float), "qweight is torch.float32"),
    "swapped": (change("scales", lambda x: x.T.contiguous()), r"scales is torch.float16 of shape \[64, 3\]"),
    "NaN": (change("scales", lambda x: x * torch.nan), "scale"),
    "negative groups": (change("g_idx", lambda x: x - 1), "g_idx names groups beyond the 3"),
    "large groups": (change("g_idx", lambda x: x + 1), "g_idx names groups beyond the 3"),
    "group size": (lambda tensors, config: config.update(group_size="32"), "group_size is '32'"),
    "no group size": (lambda tensors, config: config.update(group_size=0), "group_size is 0"),
    "layout": (lambda tensors, config: config.update(checkpoint_format="gptq_p"), "layout 'gptq_p'; this reader knows"),
    "marlin": (lambda tensors, config: config.update(checkpoint_format="marlin"), "layout 'marlin'"),
    "two weights": (lambda tensors, config: tensors.update(weight=torch.ones(1)), "no place: 0.weight"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    tensors, config, _ = gptq()
    damage(tensors, config)
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as raised:
        read(write(tmp_path, tensors, config), model)
    assert str(tmp_path) in str(raised.value) or name == "NaN"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_biases_of_zeros_that_some_writers_add(tmp_path: Path) -> None:
    tensors, config, values = gptq()
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, bias=False), torch.nn.Linear(ROWS, 8))
    with pytest.raises(CheckpointError, match=r"no place: 0\.bias"):
        read(write(tmp_path, tensors, config), model)
    zeros = {"bias": torch.zeros(ROWS, dtype=torch.float16)}
    assert torch.equal(read(write(tmp_path, tensors | zeros, config), model)[0].weight, values)
