"""Which operators of torch a text may call.

A text may come from anywhere. It may therefore call only operators that compute tensors from tensors and check their
arguments. Every permitted operator was called 100 times and more with indices, sizes and numbers of all kinds: none
ended the process. The refused embedding_dense_backward, linalg_eigvals and smooth_l1_loss_backward ended it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch._decomp import decomposition_table

from fakequant.errors import GraphError
from fakequant.ir.table import ROWS, find_overload

# Parts of names: memory that nothing has written or that is not the tensor's, files, layouts and devices that graphs do
# not have, packed weights, gradients, which trust the indices of the forward, LAPACK, which a NaN can end.
_REFUSED_PARTS = (
    *("empty", "as_strided", "from_file", "sparse", "nested", "jagged", "mkldnn", "quantize", "fbgemm", "prepack"),
    *("cudnn", "miopen", "mps", "pin_memory", "to_dense", "batch_dim", "backward", "gradients", "linalg"),
)
_REFUSED = frozenset(
    """
    combinations det inverse logdet lu_solve matrix_exp matrix_power mvlgamma nuclear_norm orgqr pinverse qr slogdet
    special_multigammaln svd
    """.split()  # noqa: SIM905
)
# Operators whose names begin with "_" are torch's own business, and most check nothing. These
# are what torch.export writes for models.
_PRIVATE = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _cdist_forward _fused_rms_norm _log_softmax
    _native_batch_norm_legit_no_training _pdist_forward _safe_softmax _scaled_dot_product_flash_attention_for_cpu
    _softmax _to_copy _unsafe_view _weight_norm
    """.split()  # noqa: SIM905
)
# What models call though torch defines it by nothing else.
_FURTHER = frozenset(
    """
    addbmm angle cummax cummin histc lift_fresh_copy linalg_cross linalg_vector_norm logcumsumexp masked_select max
    median min mode searchsorted view_as_complex view_as_real
    """.split()  # noqa: SIM905
)
_allowed: set[str] = set()


def allow_operator(name: str) -> None:
    """Let texts call an operator of torch or of another library in this process.

    Do that only for texts from a source that you trust: the operator then runs with whatever arguments a text gives it.

    Args:
        name: with its overload, such as "torchvision.nms.default".

    Raises:
        GraphError: torch has no operator of that name; the message names the nearest. An operator of another library is
            known once that library is imported.

    >>> allow_operator("aten.linalg_svd.default")
    """
    find_overload(name, suggest=True)
    _allowed.add(name)


def check_permitted(name: str) -> None:
    """Check that a text may have an operation of a name.

    Raises:
        GraphError: it may not; says what to do.
    """
    if name in ROWS or "." not in name or name in _allowed or _is_permitted(name):
        return
    raise GraphError(
        f"a text may not call the operator {name!r}, which is no row of the table and none of torch's core operators; "
        f"if you trust the text, call fakequant.ir.allow_operator({name!r}) before"
    )


@lru_cache
def _is_permitted(name: str) -> bool:
    """Whether an operator is one of torch's core operators or is defined by them, and is none of those refused."""
    if not name.startswith("aten."):
        return False
    overload = find_overload(name)
    packet = name.split(".")[1]
    if overload._schema.is_mutable:
        return False
    if packet in _FURTHER or packet in _PRIVATE:
        return True
    named = packet.startswith("_") and not packet.startswith("__")
    if named or packet in _REFUSED or any(part in packet for part in _REFUSED_PARTS):
        return False
    if torch.Tag.core in overload.tags or overload in decomposition_table:
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
