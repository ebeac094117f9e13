"""NF4 of bitsandbytes, plain and nested: values are exactly those of the library."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.errors import CheckpointError
from fakequant.numerics.formats import parse_format
from tests.support.quantized_folders import COLUMNS, ROWS, net, read, write

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
TABLE = torch.tensor(parse_format("nf4").grid.table.values)  # type: ignore[union-attr]


def state(**values: Any) -> Tensor:
    given = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [ROWS, COLUMNS], **values}
    return torch.tensor(list(json.dumps(given).encode()), dtype=torch.uint8)


def nf4(nested: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer, and its weight, by the library's rule."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8)
    flat, blocks = codes.flatten(), -(-codes.numel() // 64)
    found = {"weight": (flat[0::2] << 4 | flat[1::2])[:, None], "weight.quant_map": TABLE}
    scales = torch.rand(blocks) + 0.01
    found |= {"weight.absmax": scales, "weight.quant_state.bitsandbytes__nf4": state()}
    if nested:
        stored, table, shared = torch.randint(0, 256, (blocks,)), torch.linspace(-1, 1, 256), torch.rand(1) * 0.1
        scales = table[stored] * shared + 0.25
        found |= {"weight.absmax": stored.to(torch.uint8), "weight.nested_absmax": shared}
        more = state(nested_blocksize=256, nested_dtype="float32", nested_offset=0.25)
        found |= {"weight.nested_quant_map": table, "weight.quant_state.bitsandbytes__nf4": more}
    return found, (TABLE[codes.long()].flatten() * scales.repeat_interleave(64)).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_and_values_are_those_of_the_rule(tmp_path: Path, nested: bool, dtype: torch.dtype) -> None:
    tensors, values = nf4(nested)
    model = read(write(tmp_path, tensors, CONFIG), net(dtype))
    assert torch.equal(model[0].weight, values.to(dtype))
    # Quantized again, 58 of 16,384 codes of nested scales were others: they are those of the file.
    codes, packed = fq.snapshot(model).weights["0.weight"].codes.flatten(), tensors["weight"].flatten()
    assert torch.equal(codes[0::2] << 4 | codes[1::2], packed)
    # Blocks of 64 go on from a row of 96 to the next: groups of 32 have the scales of their blocks.
    assert str(model[0].weight_quantizer.spec) == "nf4 per_block(-1:32)"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [96, 128])
def test_values_are_those_of_the_library(tmp_path: Path, nested: bool, dtype: torch.dtype, columns: int) -> None:
    pytest.importorskip("bitsandbytes")
    functional: Any = import_module("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(ROWS, columns).to(dtype)
    weight[:2] = 0  # blocks of zeros have the scale 0
    codes, held = functional.quantize_4bit(weight, compress_statistics=nested, quant_type="nf4", blocksize=64)
    theirs = functional.dequantize_4bit(codes, held)
    if columns % 64:  # its kernel for CPUs begins a block with each row, its quantizer and other kernels do not
        generic: Any = import_module("bitsandbytes.backends.default.ops")
        scales = functional.dequantize_blockwise(held.absmax, held.state2) + held.offset if nested else held.absmax
        theirs = generic._dequantize_4bit_compute(codes.reshape(-1), scales, held.code, 64, weight.shape, dtype)
    own = {f"weight.{key}": value for key, value in held.as_dict(packed=True).items()}
    model = torch.nn.Sequential(torch.nn.Linear(columns, ROWS), torch.nn.Linear(ROWS, 8)).to(dtype)
    assert torch.equal(read(write(tmp_path, {"weight": codes, **own}, CONFIG), model)[0].weight, theirs)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_are_read_as_any_type(tmp_path: Path, storage: torch.dtype) -> None:
    """Sharded training of floats has the bytes under the name of a float (`bnb_4bit_quant_storage`)."""
    tensors, values = nf4(nested=True)
    tensors["weight"] = tensors["weight"].flatten().view(storage)[:, None]
    assert torch.equal(read(write(tmp_path, tensors, CONFIG), net())[0].weight, values)


@pytest.mark.parametrize("size", [96, 3 * 10**8, 10**13])
def test_a_size_of_blocks_beyond_the_weight_takes_no_memory(tmp_path: Path, size: int) -> None:
    tensors, values = nf4(nested=True)
    given = {"nested_dtype": "float32", "nested_offset": 0.25}
    tensors["weight.quant_state.bitsandbytes__nf4"] = state(nested_blocksize=size, **given)
    assert torch.equal(read(write(tmp_path / "a", tensors, CONFIG), net())[0].weight, values)
    one = {"weight.absmax": torch.zeros(1, dtype=torch.uint8)}
    one["weight.quant_state.bitsandbytes__nf4"] = state(blocksize=size * 64, nested_blocksize=size, **given)
    assert read(write(tmp_path / "b", {**tensors, **one}, CONFIG), net())[0].weight.shape == (ROWS, COLUMNS)


def change(key: str, how: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({f"weight{key}": how(tensors[f"weight{key}"])})


def stated(**values: Any) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({"weight.quant_state.bitsandbytes__nf4": state(**values)})


def renamed(end: str) -> Callable[[dict[str, Tensor]], Any]:
    key = "weight.quant_state.bitsandbytes__"
    return lambda tensors: tensors.update({f"{key}{end}": tensors.pop(f"{key}nf4")})


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "cut": (change("", lambda x: x[:-1]), r"weight is torch.uint8 of shape \[3071, 1\], not"),
    "scales": (change(".absmax", lambda x: x[1:]), r"absmax is .*\[95\], not torch.float32 of \[96\]"),
    "table": (change(".quant_map", lambda x: x.flip(0)), "quant_map is another table than that of NF4"),
    "shape": (stated(shape=[COLUMNS, ROWS]), r"of a weight of shape \[96, 64\], not \[64, 96\]"),
    "huge shape": (stated(shape=[10**12, 10**12]), "of a weight of shape"),
    "block": (stated(blocksize=0), "blocksize is 0, not a number of values"),
    "block text": (stated(blocksize="64"), "blocksize is '64'"),
    "no JSON": (change(".quant_state.bitsandbytes__nf4", lambda x: x[1:]), "is not JSON"),
    "no object": (
        change(".quant_state.bitsandbytes__nf4", lambda x: torch.tensor([48]).byte()),
        "is not an object of JSON",
    ),
    "deep JSON": (change(".quant_state.bitsandbytes__nf4", lambda x: torch.full((50_000,), 91).byte()), "is not JSON"),
    "long": (change(".quant_state.bitsandbytes__nf4", lambda x: torch.zeros(1 << 20).byte()), "1048576 bytes"),
    "FP4": (renamed("fp4"), "codes are FP4 of bitsandbytes"),
    "int8": (lambda tensors: tensors.update(SCB=torch.ones(ROWS)), r"codes are LLM.int8\(\)"),
    "other": (renamed("nf3"), "no place"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    tensors, _ = nf4()
    damage(tensors)
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, tensors, CONFIG))


def test_nested_damage_is_named(tmp_path: Path) -> None:
    tensors, _ = nf4(nested=True)
    assert prod(tensors["weight.nested_absmax"].shape) == 1
    for key in ("nested_absmax", "nested_quant_map"):
        cut = {**tensors, f"weight.{key}": tensors[f"weight.{key}"][1:]}
        with pytest.raises(CheckpointError, match=f"of 0, weight.{key} is torch.float32 of shape"):
            read(write(tmp_path, cut, CONFIG))
    more = state(nested_blocksize=256, nested_offset="x")
    with pytest.raises(CheckpointError, match="nested_offset is 'x', not a number"):
        read(write(tmp_path, {**tensors, "weight.quant_state.bitsandbytes__nf4": more}, CONFIG))
