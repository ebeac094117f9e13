"""Every float layer that has a quantized one, with an input."""

import torch
from torch import Tensor, nn

from fakequant.nn import Add, MatMul

G = torch.Generator().manual_seed(3)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=G)


CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "Linear": (nn.Linear(6, 5), (data(2, 3, 6),)),
    "Linear-no-bias": (nn.Linear(6, 5, bias=False), (data(4, 6),)),
    "Conv1d": (nn.Conv1d(4, 6, 3, stride=2, dilation=2), (data(2, 4, 11),)),
    "Conv2d": (nn.Conv2d(4, 6, 3, groups=2, padding="same"), (data(2, 4, 5, 5),)),
    "Conv2d-reflect": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (data(2, 4, 5, 5),)),
    "Conv3d": (nn.Conv3d(2, 3, 2), (data(2, 2, 3, 3, 3),)),
    "ConvTranspose1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (data(2, 4, 5),)),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (data(2, 4, 5, 5),)),
    "ConvTranspose3d": (nn.ConvTranspose3d(2, 3, 2), (data(1, 2, 3, 3, 3),)),
    "Embedding": (nn.Embedding(7, 4, padding_idx=0), (torch.tensor([[0, 3], [6, 3]]),)),
    "MaxPool1d": (nn.MaxPool1d(2), (data(1, 2, 6),)),
    "MaxPool2d": (nn.MaxPool2d(2, return_indices=True), (data(1, 2, 4, 4),)),
    "MaxPool3d": (nn.MaxPool3d(2), (data(1, 2, 4, 4, 4),)),
    "AvgPool1d": (nn.AvgPool1d(2), (data(1, 2, 6),)),
    "AvgPool2d": (nn.AvgPool2d(2), (data(1, 2, 4, 4),)),
    "AvgPool3d": (nn.AvgPool3d(2), (data(1, 2, 4, 4, 4),)),
    "AdaptiveAvgPool1d": (nn.AdaptiveAvgPool1d(3), (data(1, 2, 7),)),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(1), (data(1, 2, 7, 7),)),
    "AdaptiveAvgPool3d": (nn.AdaptiveAvgPool3d(1), (data(1, 2, 3, 3, 3),)),
    "MatMul": (MatMul(), (data(2, 3, 4), data(2, 4, 5))),
    "Add": (Add(), (data(2, 3), data(3))),
    "Bilinear": (nn.Bilinear(3, 4, 5), (data(2, 6, 3), data(2, 6, 4))),
    "EmbeddingBag-sum": (nn.EmbeddingBag(7, 4, mode="sum"), (torch.tensor([[0, 3], [6, 3]]),)),
    "EmbeddingBag-mean": (nn.EmbeddingBag(7, 4, padding_idx=3), (torch.tensor([0, 3, 6, 3]), torch.tensor([0, 1]))),
    "EmbeddingBag-max": (
        nn.EmbeddingBag(7, 4, mode="max", include_last_offset=True),
        (torch.tensor([0, 3, 6, 3]), torch.tensor([0, 1, 4])),
    ),
}
