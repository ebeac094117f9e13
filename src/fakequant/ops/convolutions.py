"""Convolutions of codes on integer units, with the bits of numerics/products.py.

Contiguous inputs go to the kernel of cpu/convolution.cpp where the processor has AVX-512 VNNI. Inputs that lie
channels-last, groups and other processors go to an internal operator of torch, that of oneDNN which Inductor uses; it
is tried once per process, see products.py. Some windows it computes wrongly, or reads memory that is not there: those
that lie in padding, strides beyond the input, dilations of single taps. It is given none of these (`_plain`).
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.numerics import products
from fakequant.numerics.products import ConvParams, QuantizedOperand

from .cpu.backend import load_kernels
from .products import scale_into, scaled, trial

# Input and output channels that the kernel multiplies at a time.
_DEPTH, _ROWS = 4, 8


@cache
def convolution_unavailable(device_type: str) -> str | None:
    """Why `convolution` cannot be used on a kind of device, or None."""
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
    """Codes of a weight, int8 [out, in / groups, ...], and what each way to convolve makes of them, once it is needed.

    Args:
        codes: signed, without a zero point.
        places: where the windows are, as lists.
    """

    def __init__(self, codes: Tensor, places: ConvParams) -> None:
        self.codes, self.places = codes, places
        self._of_onednn: dict[str, Tensor] = {}

    def is_of(self, codes: Tensor) -> bool:
        """Whether these codes are packed here."""
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
        """Weights in the order in which the kernel reads them, filled up with zeros, and where the windows are."""
        outputs, channels, *kernel = self.codes.shape
        missing = 0, 0, 0, -channels % _DEPTH, 0, -outputs % _ROWS
        filled = F.pad(self.codes.reshape(outputs, channels, -1), missing)
        blocks = filled.reshape(filled.shape[0] // _ROWS, _ROWS, -1, _DEPTH, filled.shape[2])
        windows = torch.tensor([kernel, *(list(numbers) for numbers in self.places[:3])], device="cpu")
        sums = filled.sum((1, 2), dtype=torch.int32)
        return KernelWeight(blocks.permute(0, 2, 4, 1, 3).contiguous(), sums, windows)

    def of_onednn(self, shape: torch.Size, places: ConvParams) -> Tensor:
        """Codes in the layout that oneDNN wants for such windows, and for inputs of about the shape of the first."""
        packed = self._of_onednn.get(str(places))
        if packed is None:
            ones, _ = _ones_and_zeros(self.codes.shape[0])
            given = self.codes, ones, 1.0, 0, *places, list(shape)
            packed = self._of_onednn[str(places)] = torch.ops.onednn.qconv_prepack(*given)
        return packed


class KernelWeight(NamedTuple):
    """What the kernel reads of a weight.

    Attributes:
        codes: int8 [out / 8, in / 4, taps, 8, 4].
        sums: of the codes of each output channel, int32 [out, filled up].
        windows: int64 [4, axes], the sizes of the kernel, stride, padding and dilation.
    """

    codes: Tensor
    sums: Tensor
    windows: Tensor


def convolution(x: QuantizedOperand, weight: PackedWeight, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`products.convolution` with a packed weight; the result lies channels-last where the input does.

    Args:
        x: int8 or uint8 [n, in, ...]; scale and zero point per tensor.
        weight: the other factor.
        scale: of the weight [out] or [1], other axes kept or not.
        bias: [out].
    """
    _, channels, *kernel = weight.codes.shape
    sizes = [_outputs(*numbers) for numbers in zip(x.codes.shape[2:], kernel, *weight.places[:3], strict=False)]
    alike = x.codes.dim() == weight.codes.dim() and x.codes.shape[1] == channels * weight.places.groups
    if not alike or min(sizes) < 1:  # torch says what is wrong
        return products.convolution(x, QuantizedOperand(weight.codes, scale), bias, weight.places)
    zero_point = 0 if x.zero_point is None else int(x.zero_point)
    by_channels = is_channels_last(x.codes)
    codes = x.codes if by_channels else x.codes.contiguous()
    if not by_channels and weight.places.groups == 1 and _has_kernel():
        return _by_kernel(x._replace(codes=codes), zero_point, weight, scale, bias, sizes)
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


def is_channels_last(x: Tensor) -> bool:
    """Whether x [n, channels, ...] counts as channels-last, and torch's convolution by oneDNN lies so; never with gaps.

    By the rule of torch (c10/core/MemoryFormat.h), which reads the strides of axes of one element too: a picture whose
    channels lie last is none where its axis n was added by `unsqueeze`, with a stride too small.
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
    """How many windows there are along an axis."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _by_kernel(
    x: QuantizedOperand, zero_point: int, weight: PackedWeight, scale: Tensor, bias: Tensor | None, sizes: list[int]
) -> Tensor:
    outputs = weight.codes.shape[0]
    y = x.codes.new_empty((x.codes.shape[0], outputs, *sizes), dtype=torch.float32)
    scale = scale.reshape(-1).expand(outputs).contiguous()
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    torch.ops.fakequant_cpu.convolve(x.codes, zero_point, *weight.of_kernel, x.scale, scale, bias, y)
    return y


def _sums(codes: Tensor, zero_point: int, weight: PackedWeight) -> Tensor:
    """Exact sums by oneDNN, rounded to float32."""
    codes, places = _plain(codes, zero_point, weight)
    packed = weight.of_onednn(codes.shape, places)
    ones, zeros = _ones_and_zeros(packed.shape[0])
    given = codes, 1.0, zero_point, packed, ones, zeros, None
    return torch.ops.onednn.qconv_pointwise(*given, *places, 1.0, 0, torch.float32, "none", [], "")


def _plain(codes: Tensor, zero_point: int, weight: PackedWeight) -> tuple[Tensor, ConvParams]:
    """The same sums by windows that oneDNN computes rightly: 0 of 17,000 random ones differed."""
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
