"""Results of the independent oracle, as tensors."""

import numpy as np
import torch

from tests.support import oracle

UNSIGNED = {1: torch.uint8, 2: torch.uint16}


def to_numpy(x):
    return x.numpy() if x.dtype in (torch.float32, torch.float64) else x.float().numpy()


def to_dtype(value, dtype):
    """The oracle's value in the dtype of the input, rounded by the oracle."""
    if dtype in (torch.float16, torch.bfloat16):
        rounded = oracle.round_to(value, oracle.FLOAT16 if dtype == torch.float16 else oracle.BFLOAT16)
        return torch.from_numpy(rounded).to(dtype)
    return torch.from_numpy(np.asarray(value))


def decoded(codes, fmt):
    """Stored codes as float64, by the oracle."""
    assert codes.dtype != torch.int16 or isinstance(fmt, oracle.Integers) or fmt.bits == 16
    patterns = codes.numpy() if isinstance(fmt, oracle.Integers) else codes.view(UNSIGNED[codes.itemsize]).numpy()
    return torch.from_numpy(np.asarray(oracle.decode_pattern(patterns, fmt)))


def wanted_codes(right, fmt):
    """The oracle's codes as they can be stored: NaN as the format has it, integers without a negative zero."""
    code = np.where(np.isnan(right.code), oracle.stored_nan(fmt), right.code)
    return torch.from_numpy(np.asarray(code + 0.0 if isinstance(fmt, oracle.Integers) else code, np.float64))
