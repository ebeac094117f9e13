"""llama.cpp's tokenizer and its llama-quantize, for tests."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from fakequant.delivery.gguf import llama_cpp
from fakequant.delivery.gguf.blocks import GgufFile


def bindings() -> Any:
    """The module of the bindings; a test that asks for them is skipped where they are not there."""
    if not llama_cpp.is_there():
        pytest.skip(llama_cpp.ABSENT)
    return llama_cpp.bindings()


def split(path: Path, tensors: int) -> Path:
    """Split a file by the package gguf into files of at most `tensors` tensors; returns the path of the first one."""
    import gguf

    whole = GgufFile(path)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors)
    for key, field in gguf.GGUFReader(path).fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            writer.add_key_value(key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for name, one in whole.tensors.items():
        kind = gguf.GGMLQuantizationType[one.kind]
        raw = one.make()
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def tokens(path: Path, text: str) -> list[int]:
    """The token ids of a text, special tokens within it too."""
    lib = bindings()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    found, raw = (lib.llama_token * 4096)(), text.encode()
    count = lib.llama_tokenize(lib.llama_model_get_vocab(model), raw, len(raw), found, 4096, True, True)
    lib.llama_model_free(model)
    return list(found[:count])


def quantize(source: Path, target: Path, kind: str) -> None:
    """Quantize a file by llama.cpp itself, as llama-quantize does."""
    lib = bindings()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    assert lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) == 0
