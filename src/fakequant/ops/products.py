"""Integer products and convolutions of codes, with the bits of numerics/products.py.

They use internal operators of torch: `torch._int_mm`, and for convolutions the oneDNN operator that Inductor uses. Each
is tested once per process on numbers that show saturating or inexact sums, and is used only if it passes; else the
reason is returned, and the layer is simulated. A processor without integer dot products sums the same integers in
float32, which is exact for short parts.

Contiguous inputs of convolutions go to the kernel of cpu/convolution.cpp if the processor has AVX-512 VNNI. oneDNN
computes channels-last inputs, groups, and all inputs on other processors. It is wrong, or reads foreign memory, for
windows inside padding, strides beyond the input, and dilations of kernels of size 1; `_plain` rewrites these.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.numerics import products
from fakequant.numerics.products import ConvParams, FixedPoint, QuantizedOperand
from fakequant.ops.cpu.backend import load_kernels

# Codes of these dtypes are multiplied; 4-bit codes are stored in them too.
CODES = (torch.int8, torch.uint8)
_LARGEST_SUM = 2**31 - 1
# So many products of centred codes, of at most 8 bits and a sign, have sums that float32 holds in any order.
_EXACT_IN_FLOAT32 = 2**24 // 255**2
# The same for codes as they are stored, of at most 255 and -128: 514, in parts of whole vectors.
_EXACT_CODES = 512
_X86 = ("x86_64", "AMD64")
# Matrices of so many products are multiplied faster all at once in float than one by one: 64 of 64x64 by 64x64 take
# 0.24 and 0.38 ms, 32 of 128x64 by 64x128 take 0.40 and 0.25 ms.
_SMALL = 2**19
# Bytes at whose multiples cuBLASLt reads codes at its full speed.
_ALIGNED = 16


def largest_inner_size(x_magnitude: int, weight_magnitude: int) -> int:
    """How many products of codes up to these magnitudes int32 can always sum.

    >>> largest_inner_size(128, 128), largest_inner_size(255, 128)
    (131071, 65793)
    """
    return _LARGEST_SUM // (x_magnitude * weight_magnitude)


@cache
def linear_unavailable(device_type: str) -> str | None:
    """Why `linear` cannot run on a device type; None if it can."""
    if device_type not in ("cpu", "cuda"):
        return f"integer products are for CPU and CUDA, not for {device_type}"
    codes = torch.tensor([-128, 127, -1, 64], dtype=torch.int8, device=device_type).repeat(32, 16)
    unsigned = torch.tensor([255, 0, 1, 255], dtype=torch.uint8, device=device_type).repeat(32, 16)
    # Pairs of 255 * 127 saturate where products are summed in 16 bits.
    others = torch.tensor([127, -128, 127, 127], dtype=torch.int8, device=device_type).repeat(16)[:, None].repeat(1, 16)

    def exact(a: Tensor) -> Tensor:
        return a.cpu().long() @ others.cpu().long()

    given = (codes,) if _has_cuda_limits(device_type) else (codes, unsigned)
    # In memory the others of `linear` lie by columns, those of `matmul` by rows.
    by_columns = others.t().contiguous().t()
    by_rows = trial("torch._int_mm", lambda a: _int_mm(a, others), given, exact)
    return by_rows or trial("torch._int_mm", lambda a: _int_mm(a, by_columns), given, exact)


def trial(
    name: str, compute: Callable[[Tensor], Tensor], given: tuple[Tensor, ...], exact: Callable[[Tensor], Tensor]
) -> str | None:
    """Why an operator cannot be used to sum codes exactly; None if it can.

    Raises:
        RuntimeError: out of memory, which says nothing about the operator, so that callers must not cache this failure.
    """
    try:
        wrong = [
            codes.dtype for codes in given if not torch.equal(compute(codes).cpu().double(), exact(codes).double())
        ]
    # torch raises the last where an operator is not built in, and ValueError for dtypes that it does not multiply.
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # If a CPU's memory is full, torch raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise
        return f"{name} does not run here: {str(error).splitlines()[0]}"
    return f"{name} sums codes of {wrong[0]} wrongly on this processor" if wrong else None


def linear(x: QuantizedOperand, weight: QuantizedOperand, bias: Tensor | None) -> Tensor:
    """`products.linear`, where x has one scale and zero point or one for each row, and the weight no zero point."""
    *axes, _ = x.codes.shape
    y = scaled(_row_sums(x, weight.codes), x.scale, weight.scale, bias)
    return y if len(axes) == 1 else y.reshape(*axes, weight.codes.shape[0])


def linear_sums(codes: Tensor, zero_point: int, weight: Tensor) -> Tensor | None:
    """The exact sums of products in `linear`, int32; None if they may overflow or no unit computes them."""
    if not _fit_int32(codes, weight) or linear_unavailable(codes.device.type) is not None:
        return None
    centre = torch.tensor(zero_point, device=codes.device)
    sums = _row_sums(QuantizedOperand(codes, centre, centre), weight)
    return sums.reshape(*codes.shape[:-1], weight.shape[0])


def _fit_int32(codes: Tensor, weight: Tensor) -> bool:
    """Whether both are 8-bit codes on one device, whose sums of products surely fit in int32; False if empty."""
    alike = codes.dtype in CODES and weight.dtype == torch.int8 and codes.device == weight.device
    return alike and codes.numel() > 0 and 0 < weight.numel() <= largest_inner_size(255, 128) * weight.shape[0]


def _row_sums(x: QuantizedOperand, weight: Tensor) -> Tensor:
    """The exact sums [rows, out], int32, of codes minus zero point times weights."""
    x = _taken(x)
    sums = _int_mm(x.codes.reshape(-1, x.codes.shape[-1]), weight.t())
    if x.zero_point is not None:
        # In int32, which wraps around and comes back, because the centred sum fits.
        of_ones = weight.sum(1, dtype=torch.int32)
        sums -= x.zero_point.to(torch.int32).reshape(-1, 1) * of_ones
    return sums


def matmul(x: QuantizedOperand, other: QuantizedOperand) -> Tensor:
    """`products.matmul`, where x has one scale and zero point or one for each row, and `other` has one.

    Args:
        x: int8 or uint8 [..., n, k].
        other: int8 or uint8 [..., k, m]; batch axes may differ if they broadcast.
    """
    *_, rows, inner = x.codes.shape
    columns = other.codes.shape[-1]
    fits = inner <= _EXACT_IN_FLOAT32 and rows * inner * columns <= _SMALL
    if fits and not torch.is_autocast_enabled(x.codes.device.type):  # which would multiply and round in half precision
        sums = _centred(x) @ _centred(other)
    else:
        x, (codes, _, zero_point) = _taken(x), _signed(other)
        *batch, rows, inner = x.codes.shape
        if codes.dim() == 2:
            sums = _int_mm(x.codes.reshape(-1, inner), codes)
        else:
            batch = torch.broadcast_shapes(x.codes.shape[:-2], codes.shape[:-2])
            matrices = x.codes.expand(*batch, rows, inner).reshape(-1, rows, inner)
            others = codes.expand(*batch, inner, columns).reshape(-1, inner, columns)
            sums = torch.stack([_int_mm(a, b) for a, b in zip(matrices.unbind(), others.unbind(), strict=True)])
        sums = sums.reshape(*batch, rows, columns)
        # In int32, which wraps around and comes back, because the centred sum fits.
        if x.zero_point is not None:
            sums -= x.zero_point.to(torch.int32) * codes.sum(-2, keepdim=True, dtype=torch.int32)
        if zero_point is not None:
            of_rows = x.codes.sum(-1, keepdim=True, dtype=torch.int32)
            if x.zero_point is not None:
                of_rows = of_rows - x.zero_point.to(torch.int32) * inner
            sums -= zero_point.to(torch.int32) * of_rows
    row_scale = x.scale if x.scale.numel() == 1 else x.scale.expand(*sums.shape[:-1], 1)
    return scaled(sums, row_scale, other.scale, None)


def _centred(x: QuantizedOperand) -> Tensor:
    """The codes minus the zero point, float32."""
    codes = x.codes.to(torch.float32)
    return codes if x.zero_point is None else codes.sub_(x.zero_point)


def _has_cuda_limits(device_type: str) -> bool:
    """Whether `torch._int_mm` is CUDA's, which takes only int8, more than 16 rows, and sizes divisible by 8."""
    return device_type == "cuda"


def _taken(x: QuantizedOperand) -> QuantizedOperand:
    """The first factor, converted to int8 codes if `torch._int_mm` needs that."""
    return _signed(x) if _has_cuda_limits(x.codes.device.type) else x


def _signed(x: QuantizedOperand) -> QuantizedOperand:
    """The same values with int8 codes: uint8 codes and the zero point are shifted by -128."""
    if x.codes.dtype == torch.int8:
        return x
    # Filled on the device: `torch.tensor` copies the number there, and waits for it.
    zero_point = torch.full((), -128, device=x.codes.device) if x.zero_point is None else x.zero_point - 128
    return QuantizedOperand((x.codes ^ 128).view(torch.int8), x.scale, zero_point)


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Exact sums [n, m] of codes [n, k] and [k, m]."""
    if not _has_cuda_limits(a.device.type):
        if not _multiplies_slowly(a.device.type):
            return torch._int_mm(_with_plain_strides(a), _with_plain_strides(b))
        # Float32 products of parts so short that float32 holds every sum exactly.
        sums = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.int32)
        with torch.autocast("cpu", enabled=False):  # it would round the sums to half precision
            for parts in zip(a.split(_EXACT_CODES, 1), b.split(_EXACT_CODES, 0), strict=True):
                first, second = (part.to(torch.float32) for part in parts)
                sums += (first @ second).to(torch.int32)
        return sums
    (rows, inner), columns = a.shape, b.shape[1]
    a = padded(a.contiguous(), max(17 - rows, 0), -inner % 8)
    return torch._int_mm(a, padded(b, -inner % 8, -columns % 8))[:rows, :columns].contiguous()


def _multiplies_slowly(device_type: str) -> bool:
    """Whether `torch._int_mm` runs its slow loop for CPUs without integer dot products, 20 times as slow as float."""
    return device_type == "cpu" and platform.machine() in _X86 and not torch.cpu._is_vnni_supported()


def _with_plain_strides(codes: Tensor) -> Tensor:
    """Codes [n, m] as contiguous rows if an axis has one element, whose stride torch's kernels misread.

    The CPU kernel of torch 2.13 takes [1, 4] with strides (1, 1), as `weight.t()` has in a layer with one input, for
    columns of a larger matrix, and reads beyond its end.
    """
    return codes.contiguous().view(-1).view(codes.shape) if 1 in codes.shape else codes


def padded(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Codes with more rows and columns of zeros; also copied if kernels for whole blocks could not read the codes."""
    codes = _with_plain_strides(codes)
    dense = codes.is_contiguous() or codes.t().is_contiguous()
    if not rows and not columns and dense and codes.storage_offset() % _ALIGNED == 0:
        return codes
    return F.pad(codes, (0, columns, 0, rows))


def scaled(sums: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None) -> Tensor:
    """`products.scaled` of int32 or float32 sums [..., columns], in one pass if the kernels are built.

    `row_scale` has one scale or one per row, `column_scale` one or one per column, and `bias` one per column.
    """
    if sums.device.type == "cpu" and load_kernels() is None:
        y = sums.new_empty(sums.shape, dtype=torch.float32)
        scale_into(y, sums, (row_scale, column_scale), bias)
        return y
    columns = sums.shape[-1]
    scale = row_scale.reshape(-1, 1) * column_scale.reshape(-1).expand(columns)
    return products.scaled(sums.reshape(-1, columns), scale, bias).reshape(sums.shape)


def scale_into(
    y: Tensor, sums: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None, *, channels_first: bool = False
) -> None:
    """`scaled` by the kernels, written to y [..., columns], or to y [n, columns, ...] from sums [n, ..., columns]."""
    columns = sums.shape[-1]
    row_scale, column_scale = (scale.reshape(-1) for scale in scales)
    if column_scale.numel() != columns:
        column_scale = column_scale.expand(columns)
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    given = row_scale.contiguous(), column_scale.contiguous(), bias, y, sums.shape[0] if channels_first else 1
    torch.ops.fakequant_cpu.scale_sums(sums, *given, channels_first)


def fixed_point(sums: Tensor, by: FixedPoint, low: int, high: int) -> Tensor:
    """`products.fixed_point`, in one pass and as int8 or uint8 if the kernels are built and the codes fit.

    Args:
        sums: exact integers.
        by: one multiplier, or one for each position along an axis.
        low, high: the range of codes.
    """
    fitting = (d for d in (torch.uint8, torch.int8) if torch.iinfo(d).min <= low and high <= torch.iinfo(d).max)
    dtype = next(fitting, None)
    is_whole = sums.dtype in (torch.int32, torch.float32)
    if dtype is None or not is_whole or sums.device.type != "cpu" or load_kernels() is not None:
        return products.fixed_point(sums, by, low, high)
    shape = by.steps.shape[1:]
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    inner = sums.numel() if axis is None else math.prod(sums.shape[axis + 1 :])
    by_channels = axis == 1 and is_channels_last(sums)
    if by_channels:
        sums, inner = sums.movedim(1, -1), 1
    codes = sums.new_empty(sums.shape, dtype=dtype)
    torch.ops.fakequant_cpu.fixed_point(sums.contiguous(), by.steps, low, high, inner, codes)
    return codes.movedim(-1, 1) if by_channels else codes


# Input and output channels that the kernel multiplies at a time.
_DEPTH, _ROWS = 4, 8
# The kernel of single channels multiplies sizes, strides, paddings and dilations below this.
_LARGEST_WINDOW = 1 << 20


@cache
def convolution_unavailable(device_type: str) -> str | None:
    """Why `convolution` cannot run on a device type; None if it can."""
    if device_type != "cpu":
        return f"integer convolutions are for CPU, not for {device_type}"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qconv_prepack"):
        return "this build of torch has no integer convolution of oneDNN"
    codes = torch.tensor([255, 254, 0, 255], dtype=torch.uint8, device="cpu").repeat(16, 25).reshape(2, 32, 5, 5)
    weight = torch.tensor([127, -128, 127, 126], dtype=torch.int8, device="cpu").repeat(8, 72).reshape(8, 32, 3, 3)
    places = ConvParams([1, 1], [1, 1], [1, 1], 1)
    packed = PackedWeight(weight, places)

    def exact(x: Tensor) -> Tensor:
        one, ones = torch.ones((), dtype=torch.float32, device="cpu"), torch.ones(8, dtype=torch.float32, device="cpu")
        return products.convolution(
            QuantizedOperand(x, one, torch.tensor(3, device="cpu")), QuantizedOperand(weight, ones), None, places
        )

    return trial("onednn.qconv_pointwise", lambda x: _sums(x, 3, packed), (codes,), exact)


class PackedWeight:
    """The codes of a convolution's weight, int8 [out, in / groups, ...], with cached layouts for each kernel.

    Args:
        codes: signed codes without a zero point.
        places: stride, padding and dilation as lists, and groups.
    """

    def __init__(self, codes: Tensor, places: ConvParams) -> None:
        self.codes, self.places = codes, places
        self._of_onednn: dict[str, Tensor] = {}

    def is_of(self, codes: Tensor) -> bool:
        """Whether `codes` equal the packed codes."""
        if codes is self.codes:
            return True
        if codes.shape != self.codes.shape:
            return False
        pair = self.codes, codes
        if codes.numel() % 8 == 0 and all(one.is_contiguous() for one in pair):  # 8 at a time: 7 us instead of 56
            pair = tuple(one.view(-1).view(torch.int64) for one in pair)
        return torch.equal(*pair)

    @cached_property
    def of_kernel(self) -> KernelWeight:
        """The codes in the order in which the kernel reads them, padded with zeros, with their sums and windows."""
        outputs, channels = self.codes.shape[:2]
        missing = 0, 0, 0, -channels % _DEPTH, 0, -outputs % _ROWS
        filled = F.pad(self.codes.reshape(outputs, channels, -1), missing)
        blocks = filled.reshape(filled.shape[0] // _ROWS, _ROWS, -1, _DEPTH, filled.shape[2])
        sums = filled.sum((1, 2), dtype=torch.int32)
        return KernelWeight(blocks.permute(0, 2, 4, 1, 3).contiguous(), sums, self.windows)

    @cached_property
    def windows(self) -> Tensor:
        """The kernel sizes, strides, paddings and dilations, int64 [4, axes]."""
        numbers = self.codes.shape[2:], *self.places[:3]
        return torch.tensor([list(each) for each in numbers], device="cpu")

    @cached_property
    def is_depthwise(self) -> bool:
        """Whether the weight is depthwise, and `convolve_channels` supports its windows."""
        takes = self.codes.dim() < 5 and int(self.windows.max()) < _LARGEST_WINDOW
        return takes and self.codes.shape[1] == 1 < self.places.groups

    def of_onednn(self, shape: torch.Size, places: ConvParams) -> Tensor:
        """The codes in oneDNN's layout for these windows, and for inputs of about the shape of the first input."""
        packed = self._of_onednn.get(str(places))
        if packed is None:
            ones, _ = _ones_and_zeros(self.codes.shape[0])
            given = self.codes, ones, 1.0, 0, *places, list(shape)
            packed = self._of_onednn[str(places)] = torch.ops.onednn.qconv_prepack(*given)
        return packed


class KernelWeight(NamedTuple):
    """The tensors of a weight that the kernel reads.

    Attributes:
        codes: int8 [out / 8, in / 4, taps, 8, 4].
        sums: the sums of codes of each output channel, int32 [out, padded].
        windows: int64 [4, axes], the sizes of the kernel, stride, padding and dilation.
    """

    codes: Tensor
    sums: Tensor
    windows: Tensor


def convolution(x: QuantizedOperand, weight: PackedWeight, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`products.convolution` with a packed weight; the result is channels-last if the input is.

    Args:
        x: int8 or uint8 [n, in, ...]; scale and zero point per tensor.
        weight: the other factor.
        scale: the scale of the weight, [out] or [1], or the same with further axes of length 1.
        bias: the bias [out], or None.
    """
    if (sizes := _sizes(x.codes, weight)) is None:  # torch says what is wrong
        return products.convolution(x, QuantizedOperand(weight.codes, scale), bias, weight.places)
    zero_point = 0 if x.zero_point is None else int(x.zero_point)
    by_channels = is_channels_last(x.codes)
    codes = x.codes if by_channels else x.codes.contiguous()
    if not by_channels and weight.places.groups == 1 and _has_kernel():
        outputs = weight.codes.shape[0]
        y = codes.new_empty((codes.shape[0], outputs, *sizes), dtype=torch.float32)
        scale = scale.reshape(-1).expand(outputs).contiguous()
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        torch.ops.fakequant_cpu.convolve(codes, zero_point, *weight.of_kernel, x.scale, scale, bias, y)
        return y
    if codes.dtype == torch.int8:
        codes, zero_point = codes.view(torch.uint8) ^ 128, zero_point + 128
    sums = _sums(codes, zero_point, weight).movedim(1, -1).contiguous()
    if by_channels:
        return scaled(sums, x.scale, scale, bias).movedim(-1, 1)
    if load_kernels() is not None:
        return scaled(sums, x.scale, scale, bias).movedim(-1, 1).contiguous()
    images, *sizes, outputs = sums.shape
    y = sums.new_empty((images, outputs, *sizes), dtype=torch.float32)
    scale_into(y, sums, (x.scale, scale), bias, channels_first=True)
    return y


def convolution_sums(codes: Tensor, zero_point: int, weight: PackedWeight) -> Tensor | None:
    """The exact sums of products in `convolution`, int32 or float32; None if inexact, or no unit computes them."""
    if not _fit_int32(codes, weight.codes) or convolution_unavailable(codes.device.type) is not None:
        return None
    if (sizes := _sizes(codes, weight)) is None:
        return None
    by_channels = is_channels_last(codes)
    if not by_channels and weight.places.groups == 1 and _has_kernel():
        sums = codes.new_empty((codes.shape[0], weight.codes.shape[0], *sizes), dtype=torch.int32)
        given = codes.contiguous(), zero_point, *weight.of_kernel, None, None, None, sums
        torch.ops.fakequant_cpu.convolve(*given)
        return sums
    if weight.is_depthwise and not by_channels and load_kernels() is None:
        sums = codes.new_empty((codes.shape[0], weight.codes.shape[0], *sizes), dtype=torch.int32)
        given = codes.contiguous(), zero_point, weight.codes.contiguous(), weight.windows, sums
        torch.ops.fakequant_cpu.convolve_channels(*given)
        return sums
    if weight.codes[0].numel() > _EXACT_IN_FLOAT32:
        return None
    if codes.dtype == torch.int8:
        codes, zero_point = codes.view(torch.uint8) ^ 128, zero_point + 128
    sums = _sums(codes, zero_point, weight)
    return sums if by_channels else sums.contiguous()


def _sizes(codes: Tensor, weight: PackedWeight) -> list[int] | None:
    """The number of windows along each axis; None if the shapes of codes and weight do not fit."""
    _, channels, *kernel = weight.codes.shape
    if codes.dim() != weight.codes.dim() or codes.shape[1] != channels * weight.places.groups:
        return None
    sizes = [_outputs(*numbers) for numbers in zip(codes.shape[2:], kernel, *weight.places[:3], strict=True)]
    return None if min(sizes) < 1 else sizes


def is_channels_last(x: Tensor) -> bool:
    """Whether x [n, channels, ...] is channels-last by torch's rule, as oneDNN's result then is, too; False with gaps.

    The rule of torch (c10/core/MemoryFormat.h) also reads strides of axes of one element: an image with channels last
    does not count if its axis n was added by `unsqueeze`, with a stride that is too small.
    """
    if x.dim() < 4 or not x.numel():
        return False
    shape, stride, least = x.shape, x.stride(), 0
    for axis in (1, *range(x.dim() - 1, 1, -1)):
        if stride[axis] < least:
            return False
        least = stride[axis] * shape[axis]
    return stride[0] >= least != stride[1] > 0 and x.movedim(1, -1).is_contiguous()


@cache
def _has_kernel() -> bool:
    return load_kernels() is None and torch.ops.fakequant_cpu.convolves()


def _outputs(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The number of windows along an axis, from its size and the kernel's parameters."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _sums(codes: Tensor, zero_point: int, weight: PackedWeight) -> Tensor:
    """The exact sums by oneDNN, as float32."""
    codes, places = _plain(codes, zero_point, weight)
    packed = weight.of_onednn(codes.shape, places)
    ones, zeros = _ones_and_zeros(packed.shape[0])
    given = codes, 1.0, zero_point, packed, ones, zeros, None
    return torch.ops.onednn.qconv_pointwise(*given, *places, 1.0, 0, torch.float32, "none", [], "")


def _plain(codes: Tensor, zero_point: int, weight: PackedWeight) -> tuple[Tensor, ConvParams]:
    """Codes and windows, rewritten so that oneDNN sums them exactly, as it did for 17,000 random windows."""
    stride, padding, dilation, groups = weight.places
    if any(padding):
        codes = F.pad(codes, [n for n in reversed(padding) for _ in range(2)], value=zero_point)
    strides, dilations = [], []
    for axis, (kernel, step, apart) in enumerate(zip(weight.codes.shape[2:], stride, dilation, strict=True), 2):
        only = _outputs(codes.shape[axis], kernel, step, 0, apart) == 1
        if only:
            codes = codes.narrow(axis, 0, apart * (kernel - 1) + 1)
        strides.append(1 if only else step)
        dilations.append(apart if kernel > 1 else 1)
    return codes, ConvParams(strides, [0] * len(padding), dilations, groups)


@cache
def _ones_and_zeros(channels: int) -> tuple[Tensor, Tensor]:
    ones = torch.ones(channels, dtype=torch.float32, device="cpu")
    return ones, torch.zeros(channels, dtype=torch.int64, device="cpu")
