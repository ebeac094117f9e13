"""ONNX files whose record of quantizers was changed at random, as a careless or hostile tool would."""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fakequant as fq

# Preset and style: parameters in the file, zero points, dynamic ranges, blocks, scales of scales.
_BASES = (
    *(("INT8_AFFINE", "portable"), ("INT8_PER_TOKEN", "standard"), ("FP8", "portable"), ("MXFP4", "portable")),
    ("NVFP4_WEIGHT_ONLY", "standard"),
)
_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 8, 16, 127, 2**30, 2**31, 2**63, -(2**63), 10**30, 1.5, -0.0, 1e300),
    *(float("nan"), float("inf"), "", "nn", "load", "nope", "float32", "float64", "bfloat16", "int64", "bool"),
    *("x", "linear", "0.weight", "0._input_quantizer", "0._weight_quantizer/codes", "0._weight_quantizer/scale"),
    *("constant", "dynamic", "computed", "portable", "standard", "trt", "int8 per_tensor", "uint8 per_tensor"),
    *("int8 per_channel(0)", "int8 per_channel(9)", "int8 per_block(-1:1000000)", "nf4 per_block(-1:64)", "int4"),
    *("int[-1000000000000,1000000000000]", "a" * 10_000, "\x1b[2J", "\ud800", "../../etc/passwd"),
    *([], {}, [[]], [1, 1], [-1, -1], [10**6, 10**6], [1] * 1000, ["x"], [None], {"a": 1}),
)


def record_mutations(seed: int) -> Iterator[bytes]:
    """Files without end, each with one to four changes of the record; the same for the same seed."""
    draw = random.Random(seed)
    while True:
        data = draw.choice(_bases())
        model = _parsed(data)
        entry = next(entry for entry in model.metadata_props if entry.key == "fakequant")
        values = json.loads(entry.value)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            values = _changed(values, draw)
        text = json.dumps(values)
        if draw.random() < 0.05:
            text = _cut(text, draw)
        entry.value = text.encode("utf-8", "replace").decode()
        yield model.SerializeToString()


def _parsed(data: bytes) -> Any:
    import onnx

    return onnx.load_model_from_string(data)


@cache
def _bases() -> tuple[bytes, ...]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for preset, style in _BASES:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 4))
            fq.prepare(model, preset)
            fq.calibrate(model, [torch.randn(8, 64)])
            path = Path(folder) / "m.onnx"
            fq.export_onnx(model, torch.randn(3, 64), path, style=style)
            found.append(path.read_bytes())
    return tuple(found)


def _changed(values: Any, draw: random.Random) -> Any:
    """The values, one of them replaced, taken away, doubled or exchanged with another."""
    places = list(_places(values, ()))
    place, kind = draw.choice(places), draw.randrange(6)
    if kind == 0 and values:
        return _without(values, place)
    if kind == 1:
        return _replaced(values, place, _at(values, draw.choice(places)))
    if kind == 2:
        other = draw.choice(places)
        first, second = _at(values, place), _at(values, other)
        return _replaced(_replaced(values, place, second), other, first) if _exists(values, other) else values
    if kind == 3 and isinstance(held := _at(values, place), list):
        return _replaced(values, place, [*held, *held[:1]] * draw.choice((1, 2, 50)))
    return _replaced(values, place, draw.choice(_HOSTILE))


def _places(values: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    if place or not items:
        yield place
    for key, value in items:
        yield from _places(value, (*place, key))


def _at(values: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        values = values[key]
    return copy.deepcopy(values)


def _exists(values: Any, place: tuple[Any, ...]) -> bool:
    return place in set(_places(values, ()))


def _replaced(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    changed = copy.copy(values)
    if not isinstance(changed, (dict, list)):
        return changed
    key = place[0]
    inside = isinstance(changed, dict) or (isinstance(key, int) and key < len(changed))
    if inside and (isinstance(changed, list) or key in changed):
        changed[key] = _replaced(changed[key], place[1:], value)
    return changed


def _without(values: Any, place: tuple[Any, ...]) -> Any:
    holder = _at(values, place[:-1]) if place else None
    if not isinstance(holder, (dict, list)) or not holder:
        return values
    del holder[place[-1]]
    return _replaced(values, place[:-1], holder)


def _cut(text: str, draw: random.Random) -> str:
    """Truncated, deeply nested, or with a byte changed."""
    where = draw.randrange(len(text) + 1)
    return draw.choice(
        (text[:where], text[:where] + "[" * 100_000, text[:where] + chr(draw.randrange(128)) + text[where + 1 :])
    )
