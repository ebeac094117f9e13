"""Damaged checkpoints: whatever is wrong with one is said, and the model stays as it was."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CheckpointError
from fakequant.model import presets
from fakequant.model.state.checkpoint import load, save
from tests.support.checkpoints import assert_as_before, change_manifest, change_tensors, put_tensors, state_of
from tests.support.models import images, small_net


@pytest.fixture
def folder(tmp_path):
    model = fq.prepare(small_net(), presets.INT8_AFFINE)
    fq.calibrate(model, [images()])
    model.head._weight_quantizer.learn("lsq")
    model.stem._input_quantizer.learn("lsq_plus")
    return save(model, tmp_path)


def assert_refused(folder, match: str) -> None:
    fresh = small_net()
    before = state_of(fresh)
    with pytest.raises(CheckpointError, match=match):
        load(fresh, folder)
    assert_as_before(fresh, before)


def _set(*path_and_value: Any):
    *path, last, value = path_and_value

    def change(manifest: dict[str, Any]) -> None:
        for key in path:
            manifest = manifest[key]
        manifest[last] = value

    return change


HEAD = ("layers", "head")
WEIGHT = (*HEAD, "quantizers", "_weight_quantizer")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("fakequant", 2), "checkpoint of version 2, written by a later version .*: update fakequant"),
        (_set("fakequant", True), "is not a checkpoint of version 1"),
        (_set(*HEAD, "execution", "warp"), r"layers\.head\.execution is 'warp', which is none of simulate, auto"),
        (_set(*WEIGHT, "mode", "dream"), r"_weight_quantizer\.mode is 'dream', which is none of off, observe"),
        (_set(*WEIGHT, "mode", ["off"]), r"mode is \['off'\], which is none of"),
        (_set(*WEIGHT, "tensor", "int9x per_tensor"), r"int9x.*later version of fakequant, or needs what"),
        (_set(*WEIGHT, "tensor", None), r"tensor is None, not a text"),
        (_set(*WEIGHT, "learned", {"method": "lsq"}), r"learned lacks options"),
        (_set(*WEIGHT, "learned", "options", {"gradient_factor": "no"}), r"gradient_factor is 'no', not a bool"),
        (_set(*WEIGHT, "learned", "options", {"method": 1}), r"options has method, which is not an option"),
        (_set(*WEIGHT, "learned", "method", "sgd"), "unknown method 'sgd'"),
        (_set(*WEIGHT, "learned", None), r"head\._weight_quantizer cannot be used: it holds lsq\.step"),
        (_set(*HEAD, "type", 3), r"layers\.head\.type is 3, not a text"),
        (_set(*HEAD, "quantizers", "_other_quantizer", {"tensor": "int8", "mode": "off", "learned": None}),
         "layer head has quantizers _other_quantizer, but a Linear has _input_quantizer, _weight_quantizer"),
        (_set(*HEAD, []), r"layers\.head is \[\], not an object"),
        (lambda manifest: manifest.pop("layers"), "it lacks layers"),
        (lambda manifest: manifest.clear() or manifest.update(model="other"), "is not a checkpoint of version 1"),
        (_set("layers", ["stem"]), r"layers is \['stem'\], not an object"),
        (_set("shared", {"head.weight": "stem.weight"}),
         r"is damaged: it lists head\.weight as shared with stem\.weight, and also stores it as a separate tensor"),
        (_set("shared", {"tied": "nothing"}),
         "is damaged: tied should share the tensor nothing, which the checkpoint lacks; save the model"),
        (_set("shared", {"tied": 1}), r"shared\.tied is 1, not a text"),
        (_set("tensors", "bytes", -1), r"tensors\.bytes is -1"),
        (_set("tensors", "sha256", "0" * 63), "not 64 hexadecimal digits"),
        (_set("tensors", "file", "../secret"), r"tensors\.file is '\.\./secret', not a name such as model-"),
        (_set("tensors", None), "tensors is None, not an object"),
        (_set("versions", {"norm": "two"}), r"versions\.norm is 'two'"),
    ],
)  # fmt: skip
def test_a_manifest_with_one_odd_value(folder, change, message: str) -> None:
    change_manifest(folder, change)
    assert_refused(folder, message)


@pytest.mark.parametrize("content", ["[" * 200_000, "[]", "null", '{"fakequant": 1e999}', "{" * 100_000, "\ufeff{}"])
def test_a_manifest_that_is_none(folder, content: str) -> None:
    (folder / "fakequant.json").write_text(content, encoding="utf-8")
    assert_refused(folder, r"fakequant\.json (is damaged|is not a checkpoint)")


def scale_of(name: str, value: Any):
    return lambda tensors: tensors.update({f"{name}.scale": value(tensors[f"{name}.scale"])})


INPUT = "head._input_quantizer"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((lambda s, v=v: torch.full_like(s, v), r"scale must be a positive, finite number") for v in
          (float("nan"), float("inf"), 0.0, -1.0)),
        *((lambda s, d=d: s.to(d), "scale (must be float32|is float64)") for d in
          (torch.bool, torch.int32, torch.float16, torch.float64, torch.complex64)),
        (lambda s: s.reshape(-1)[:1].expand(5).clone(), "has shape"),
    ],
    ids=["nan", "inf", "0", "-1", "bool", "int32", "float16", "float64", "complex64", "shape"],
)  # fmt: skip
@pytest.mark.parametrize("name", [INPUT, "stem._weight_quantizer"])
def test_scales_that_no_call_takes(folder, name: str, value, message: str) -> None:
    change_tensors(folder, scale_of(name, value))
    assert_refused(folder, rf"the checkpoint's quantizer {name} cannot be used: .*{message}")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda z: z + 1000, "zero_point must be a code of u?int8"),
        (lambda z: z.double() + 0.5, "zero_point must be a code of u?int8"),
        (lambda z: z.to(torch.bool), r"zero_point must be int32, got a tensor of torch\.bool"),
        (lambda z: z.to(torch.complex64), r"zero_point must be int32, got a tensor of torch\.complex64"),
        (lambda z: z.reshape(-1).expand(3).clone(), "zero_point has shape"),
    ],
)
def test_zero_points_that_no_call_takes(folder, value, message: str) -> None:
    key = f"{INPUT}.zero_point"
    change_tensors(folder, lambda tensors: tensors.update({key: value(tensors[key])}))
    assert_refused(folder, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{INPUT}.scale"), "it has a zero point, but no scale"),
        (lambda t: t.pop(f"{INPUT}.zero_point"), "it lacks zero_point, which .* needs"),
        (lambda t: t.update({"stem._weight_quantizer.zero_point": torch.zeros(8, 1, 1, 1, dtype=torch.int32)}),
         "it has a zero point, but .* is symmetric"),
        (lambda t: t.update({"head._weight_quantizer.lsq.step": torch.full((10, 1), float("nan"))}),
         "step must be finite"),
        (lambda t: t.update({"head._weight_quantizer.lsq.step": torch.ones(10)}), r"step has shape \[10\]"),
        (lambda t: t.pop("head._weight_quantizer.lsq.step"), "it lacks step, which the method 'lsq' needs"),
        (lambda t: t.pop("stem._input_quantizer.lsq_plus.offset"), "it lacks offset, which .* 'lsq_plus' needs"),
        (lambda t: t.update({"head._weight_quantizer.scale": torch.ones(10, 1)}), "learns its range by 'lsq'"),
        (lambda t: t.pop("norm.running_mean"), "does not fit the model"),
        (lambda t: t.update(another=torch.ones(1)), "does not fit the model"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_belong_to_nothing(folder, change, message: str) -> None:
    change_tensors(folder, change)
    assert_refused(folder, message)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8, torch.complex64], ids=str)
@pytest.mark.parametrize("name", ["stem.weight", "head.bias", "norm.running_var"])
def test_floats_that_are_stored_as_another_kind(folder, name: str, dtype: torch.dtype) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert_refused(folder, rf"does not fit the model: {name} is stored as {dtype}, but the model has torch\.float32")


def test_whole_numbers_that_are_stored_as_another_kind(folder) -> None:
    name = "norm.num_batches_tracked"
    for dtype in (torch.float32, torch.bool, torch.int8):
        change_tensors(folder, lambda tensors, dtype=dtype: tensors.update({name: tensors[name].to(dtype)}))
        assert_refused(folder, rf"{name} is stored as {dtype}, but the model has torch\.int64")


def header(folder) -> tuple[dict[str, Any], bytes]:
    name = json.loads((folder / "fakequant.json").read_text())["tensors"]["file"]
    data = (folder / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0", "C64", "F128"])
def test_tensors_of_a_dtype_that_is_not_theirs(folder, dtype: str) -> None:
    head, data = header(folder)
    head["head.bias"]["dtype"] = dtype
    text = json.dumps(head).encode()
    put_tensors(folder, len(text).to_bytes(8, "little") + text + data)
    assert_refused(folder, "cannot be read")


def test_an_error_of_a_module_leaves_the_model_as_it_was(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = small_net()

    def refuse(*_: object) -> None:
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(type(fresh.head), "_load_from_state_dict", refuse)
    before = state_of(fresh)
    with pytest.raises(ZeroDivisionError, match="of its own"):
        load(fresh, folder)
    assert_as_before(fresh, before)


def test_scales_in_float64_belong_to_models_in_float64(tmp_path) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(4, 3)).double(), "int8")
    x = torch.randn(5, 4, dtype=torch.float64)
    fq.calibrate(model, [x])
    save(model, tmp_path)
    assert torch.equal(load(nn.Sequential(nn.Linear(4, 3)).double(), tmp_path)(x), model(x))
    with pytest.raises(CheckpointError, match=r"scale is float64, .*call model\.double\(\) before load"):
        load(nn.Sequential(nn.Linear(4, 3)), tmp_path)


class Versioned(nn.Module):
    """Reads its state by the version in which it was saved, as torchvision's MNASNet does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args) -> None:  # type: ignore[override]
        if local_metadata.get("version") not in (1, 2):
            raise ValueError(f"version should be set to 1 or 2 instead of {local_metadata.get('version')}")
        self.read = local_metadata["version"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@pytest.mark.parametrize(("saved_by", "expected"), [(2, 2), (1, 1), (None, 2)])
def test_modules_are_told_the_version_in_which_they_were_saved(
    tmp_path, monkeypatch: pytest.MonkeyPatch, saved_by: int | None, expected: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Versioned, "_version", saved_by or 2)
        save(fq.prepare(nn.Sequential(Versioned()), "int8_weight_only"), tmp_path)
    if saved_by is None:  # a checkpoint that does not say it
        change_manifest(tmp_path, lambda manifest: manifest.pop("versions"))
    assert load(nn.Sequential(Versioned()), tmp_path)[0].read == expected


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders")
@pytest.mark.parametrize("device", [False, True])
def test_a_manifest_that_never_ends_is_refused(device: bool, tmp_path: Path) -> None:
    save(fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8_weight_only"), tmp_path)
    (tmp_path / "fakequant.json").unlink()
    if device:
        (tmp_path / "fakequant.json").symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "fakequant.json")
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        load(nn.Sequential(nn.Linear(4, 4)), tmp_path)


@pytest.mark.parametrize("call", ["save", "deliver", "codes"])
def test_a_name_that_no_file_can_hold_is_refused(call: str, tmp_path: Path) -> None:
    net = nn.Sequential()
    net.add_module("half \ud800", nn.Linear(64, 64))
    model = fq.prepare(net, "int4_group32")
    with pytest.raises(CheckpointError, match=r"cannot hold the name 'half \\ud800\..*rename the module"):
        fq.deliver(model, tmp_path, "compressed-tensors") if call == "deliver" else save(
            model, tmp_path, packed=call == "codes"
        )
    assert not [*tmp_path.iterdir()]
