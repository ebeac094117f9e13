"""llama.cpp through the bindings of llama-cpp-python, and the logits that it computes from a file.

The bindings are the installed package llama_cpp, or a source distribution of llama-cpp-python, whose folder is in the
environment variable LLAMA_CPP_BINDINGS. They load the shared libraries of the package, or of the folder in
LLAMA_CPP_LIB_PATH.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant.errors import VerificationError

_BINDINGS, _LIBRARIES = "LLAMA_CPP_BINDINGS", "LLAMA_CPP_LIB_PATH"
ABSENT = (
    "Not run by llama.cpp: run pip install llama-cpp-python; or set LLAMA_CPP_LIB_PATH to the folder of its shared "
    "libraries, and LLAMA_CPP_BINDINGS to the sources of llama-cpp-python."
)
_CACHES = {"f32": 0, "f16": 1}
_LEAST_CONTEXT = 64


def is_there() -> bool:
    """Whether bindings of llama.cpp are installed, or LLAMA_CPP_BINDINGS names them."""
    return find_spec("llama_cpp") is not None or all(os.environ.get(name) for name in (_BINDINGS, _LIBRARIES))


@cache
def bindings() -> Any:
    """The module llama_cpp.llama_cpp, after llama.cpp's log is turned off; call it only if `is_there()`."""
    if find_spec("llama_cpp") is None:
        # The package's __init__ imports more than its bindings need.
        spec = ModuleSpec("llama_cpp", None, is_package=True)
        spec.submodule_search_locations = [str(Path(os.environ[_BINDINGS]) / "llama_cpp")]
        sys.modules["llama_cpp"] = module_from_spec(spec)
    lib: Any = import_module("llama_cpp.llama_cpp")
    lib.llama_backend_init()
    lib.quiet = lib.llama_log_callback(lambda level, text, data: None)  # kept, because llama.cpp goes on calling it
    lib.llama_log_set(lib.quiet, ctypes.c_void_p(0))
    return lib


class LlamaCpp(nn.Module):
    """Runs a file in llama.cpp on a CPU, in one thread, with a cache in "f32" or "f16" and the model's arguments."""

    def __init__(self, path: Path, cache: str = "f32") -> None:
        super().__init__()
        lib = self._lib = bindings()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise VerificationError(f"llama.cpp does not load {path}")
        weakref.finalize(self, lib.llama_model_free, self._model)
        self._cache = _CACHES[cache]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        """The "logits" [rows, tokens, vocabulary] of token ids [rows, tokens]; other arguments have no effect."""
        if attention_mask is not None and not bool(attention_mask.all()):
            raise VerificationError("it runs only batches without padding; give batches of texts of equal length")
        lib, rows = self._lib, list[Tensor]()
        for ids in input_ids.tolist():
            params = lib.llama_context_default_params()
            params.n_ctx = params.n_batch = params.n_ubatch = max(_LEAST_CONTEXT, len(ids))
            params.n_threads = params.n_threads_batch = 1
            params.type_k = params.type_v = self._cache
            params.flash_attn_type, params.offload_kqv, params.op_offload = 0, False, False
            context = lib.llama_init_from_model(self._model, params)
            batch = lib.llama_batch_init(len(ids), 0, 1)
            try:
                batch.n_tokens = len(ids)
                for place, token in enumerate(ids):
                    batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
                    batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
                if status := lib.llama_decode(context, batch):
                    raise VerificationError(f"llama.cpp does not run {len(ids)} tokens: llama_decode gives {status}")
                shape = len(ids), lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
                rows.append(torch.from_numpy(np.ctypeslib.as_array(lib.llama_get_logits(context), shape).copy()))
            finally:
                lib.llama_batch_free(batch)
                lib.llama_free(context)
        return {"logits": torch.stack(rows)}
