"""Small models that the tests share."""

from functools import update_wrapper

import torch
from torch import Tensor, nn

from fakequant.nn import Add, MatMul


class SmallNet(nn.Module):
    """Every kind of quantized layer but 1-D and 3-D ones, on inputs [n, 1, 8, 8]; outputs [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.branch = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.add = Add()
        self.pool = nn.AvgPool2d(2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.maximum = nn.MaxPool2d(2)
        self.head = nn.Linear(8 * 16, 10)
        self.product = MatMul()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.maximum(self.up(self.pool(self.add(x, self.branch(x)))))
        x = self.head(x.flatten(1))
        return x + self.product(x, x.t()).mean(1, keepdim=True)


def small_net() -> SmallNet:
    return SmallNet().eval()


def images(count: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def hook_forward(layer: nn.Module) -> None:
    """Give a layer a forward of its own, as the hooks of accelerate do."""
    forward = layer.forward
    layer.forward = update_wrapper(lambda *args, **kwargs: forward(*args, **kwargs), forward)  # type: ignore[method-assign]


def two_layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(*widths[:2]), nn.ReLU(), nn.Linear(*widths[1:])).eval()


def zeroed(model: nn.Sequential) -> nn.Sequential:
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def tied() -> nn.Sequential:
    """A table of embeddings, and a head with its weight."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20, bias=False))
    net[1].weight = net[0].weight
    return net


def shared_out(model: nn.Sequential) -> nn.Sequential:
    """A model of two layers whose weights two processes share."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model
