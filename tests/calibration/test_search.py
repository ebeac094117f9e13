import pytest
import torch

from fakequant.calibration.histogram import cheapest, used_bins


def test_used_bins():
    counts = torch.tensor([[[1, 0, 0], [0, 0, 0]], [[0, 2, 0], [0, 0, 2**40]]])
    assert used_bins(counts).tolist() == [[1, 0], [2, 3]]


@pytest.mark.parametrize(("bins", "coarse"), [(64, 64), (512, 512), (16, 1000)])
def test_tries_all_where_they_are_few(bins, coarse):
    table = torch.rand(5, bins + 1, dtype=torch.float64)
    last = torch.tensor([bins, bins - 1, bins // 2, 3, 1])
    best = cheapest(lambda n: table.gather(1, n), 2, last, bins=bins, coarse=coarse)
    for row in range(5):
        first = min(2, last[row].item())
        assert best[row] == first + table[row, first : last[row] + 1].argmin()


@pytest.mark.parametrize("coarse", [8, 16, 64, 512])
def test_refines_to_the_bottom_of_a_valley(coarse):
    valleys = torch.tensor([1, 2, 500, 2049, 4095, 4096, 4000])
    last = torch.tensor([4096, 4096, 2048, 4096, 4096, 4096, 3000])
    best = cheapest(lambda n: (n - valleys[:, None]).abs().double(), 1, last, bins=4096, coarse=coarse)
    assert best.tolist() == torch.minimum(valleys, last).tolist()


@pytest.mark.parametrize("coarse", [8, 64, 512])
def test_largest_of_equals(coarse):
    last = torch.tensor([512, 300, 0])
    assert cheapest(lambda n: torch.zeros(n.shape), 10, last, bins=512, coarse=coarse).tolist() == [512, 300, 0]
    steps = cheapest(lambda n: (n > 100).double(), 1, last[:2], bins=512, coarse=coarse)
    assert steps.tolist() == [100, 100]


def test_asks_for_few_candidates():
    asked = []

    def cost(n):
        asked.append(n.shape[1])
        return (n - 77.0).abs()

    cheapest(cost, 1, torch.tensor([4096]), bins=4096, coarse=64)
    assert asked == [65, 17, 17]
