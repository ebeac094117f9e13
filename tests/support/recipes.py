"""Recipe files that the tests of the command line share."""

RECIPE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

def calibration_batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(4, 6, generator=generator), torch.zeros(4)
"""
EVALUATE = """
def evaluate(net):
    assert not net.training and not torch.is_grad_enabled()
    return torch.tensor(float(net(torch.ones(2, 6)).abs().sum()))
"""
TRAIN = """
def train(net):
    net.train()
    with torch.no_grad():
        net[0].weight.mul_(2.0)
"""
MARK = """
from pathlib import Path
Path(__file__).with_name("executed").touch()
"""
