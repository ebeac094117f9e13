"""Scores that carry the numbers of a mask have no quantizer, whatever follows the mask."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.nn.quantizer import quantizers

IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))

HIDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "temperature": lambda scores, mask: ((scores + mask) / 1.5).softmax(-1),
    "bias": lambda scores, mask: (scores + mask + torch.linspace(-1, 1, 32)).softmax(-1),
    "factor": lambda scores, mask: (0.5 * (scores + mask)).softmax(-1),
    "subtracted": lambda scores, mask: (scores - -mask).log_softmax(-1).exp(),
    "filled": lambda scores, mask: (scores.masked_fill(mask < 0, -1e9) + scores.new_ones(32)).softmax(-1),
    "chosen": lambda scores, mask: (torch.where(mask < 0, -65504.0, scores) * scores.new_ones(32)).softmax(-1),
    "written": lambda scores, mask: (written(scores, mask) / 2 + scores.new_ones(32)).softmax(-1),
    "own softmax": lambda scores, mask: (scores + mask).exp() / (scores + mask).exp().sum(-1, keepdim=True),
    "logsumexp": lambda scores, mask: scores.sigmoid() * (scores + mask).logsumexp(-1, keepdim=True),
    "sigmoid": lambda scores, mask: (scores + mask).sigmoid(),
    "infinite": lambda scores, mask: scores.masked_fill(mask < 0, -torch.inf).softmax(-1),
    "beside": lambda scores, mask: torch.cat([scores + mask, scores], -1).softmax(-1)[..., :32],
    "softmin": lambda scores, mask: nn.functional.softmin(-(scores + mask), -1),
}


def written(scores: Tensor, mask: Tensor) -> Tensor:
    scores = scores.clone()
    scores[..., mask < 0] = -1e4
    return scores


class Hides(nn.Module):
    def __init__(self, way: str, least: float) -> None:
        super().__init__()
        self.query, self.key, self.way, self.least = nn.Linear(32, 32), nn.Linear(32, 32), way, least

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT / 6
        return x + HIDING[self.way](scores, torch.ones(32, 32).triu(1) * self.least) @ x


@pytest.mark.parametrize("least", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("target", ["onnxruntime", "qnn", "openvino"])
@pytest.mark.parametrize("way", HIDING)
def test_what_carries_a_mask_has_no_quantizer(way: str, target: str, least: float) -> None:
    torch.manual_seed(0)
    model = Hides(way, least).eval()
    expected = model(IMAGE)
    fq.prepare(model, "INT8_AFFINE", example=IMAGE, target=target)
    fq.calibrate(model, [IMAGE])
    scales = {name: one.scale for name, one in quantizers(model).items() if one.scale is not None}
    assert {name for name, scale in scales.items() if scale.max() > 1} == set()
    assert ((model(IMAGE) - expected).square().sum() / expected.square().sum()).log10() < -3


def test_large_activations_are_no_mask() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) * 3e4
            return self.last(y + x)

    model = fq.prepare(Large(), "INT8_AFFINE", example=IMAGE, target="openvino")
    assert "add_0" in {site.key for site in fq.site_plan(model).sites}
