"""llama.cpp by the bindings of llama-cpp-python, where its libraries were built; for tests.

LLAMA_CPP_LIB_PATH is the folder of its shared libraries, and LLAMA_CPP_BINDINGS that of the source distribution of
llama-cpp-python, which has a folder `llama_cpp`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

_NAMES = ("LLAMA_CPP_LIB_PATH", "LLAMA_CPP_BINDINGS")


@cache
def bindings() -> Any:
    """The module of the bindings; a test that asks for them is skipped where they are not there."""
    if missing := [name for name in _NAMES if not os.environ.get(name)]:
        pytest.skip(f"llama.cpp is not there: {' and '.join(missing)} not set")
    # The package's __init__ imports more than its bindings need.
    package = ModuleType("llama_cpp")
    package.__path__ = [str(Path(os.environ[_NAMES[1]]) / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    import llama_cpp.llama_cpp as found  # pyright: ignore[reportMissingImports]

    found.llama_backend_init()
    found.quiet = found.llama_log_callback(lambda level, text, data: None)
    found.llama_log_set(found.quiet, ctypes.c_void_p(0))
    return found


def _model(path: Path, **options: bool) -> Any:
    params = bindings().llama_model_default_params()
    params.n_gpu_layers = 0
    for name, value in options.items():
        setattr(params, name, value)
    model = bindings().llama_model_load_from_file(str(path).encode(), params)
    assert model, f"llama.cpp does not load {path}"
    return model


def logits(path: Path, ids: list[int], *, cache: str = "f32") -> np.ndarray:
    """The logits [tokens, vocabulary] of a file for token ids, with a cache of "f32" or "f16"."""
    lib, model = bindings(), _model(path)
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(64, len(ids))
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = {"f32": 0, "f16": 1}[cache]
    params.flash_attn_type = 0
    context = lib.llama_init_from_model(model, params)
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    assert lib.llama_decode(context, batch) == 0
    rows = [
        np.ctypeslib.as_array(lib.llama_get_logits_ith(context, place), (size,)).copy() for place in range(len(ids))
    ]
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return np.stack(rows)


def tokens(path: Path, text: str) -> list[int]:
    """The token ids of a text, special tokens within it too."""
    lib, model = bindings(), _model(path, vocab_only=True)
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
