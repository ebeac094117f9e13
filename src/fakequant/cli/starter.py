"""A recipe to start from."""

from __future__ import annotations

from pathlib import Path

from fakequant.errors import OutputError
from fakequant.files import writable_file, write_whole

RECIPE = '''"""A recipe for fakequant: the model and its data. Replace every part that is marked EDIT.

    fakequant quantize {name} --out quantized
"""

import torch
from torch import nn


def model():
    """A new float model with its trained weights."""
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))  # EDIT: your model
    # net.load_state_dict(torch.load("weights.pt"))                      # EDIT: your weights
    return net


def calibration_batches():
    """Some hundred examples that look like those in use; not those that evaluate() measures."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        yield torch.randn(32, 16, generator=generator)  # EDIT: yield images, or (images, labels), or a dict


# EDIT: optional. A number, larger is better; it is called in eval mode without gradients.
# def evaluate(net):
#     right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in held_out)
#     return 100 * right / sum(len(labels) for _, labels in held_out)


# EDIT: optional. Fine-tunes the quantized model in place.
# def train(net):
#     import fakequant as fq
#
#     schedule = fq.qat.Schedule(original_lr=0.1, original_epochs=90)
#     fq.qat.finetune(net, loader, torch.nn.functional.cross_entropy, schedule)
'''


def write_starter(path: Path) -> None:
    """Write a recipe that runs as it is.

    Raises:
        OutputError: the file exists, or cannot be written.
    """
    if path.exists():
        raise OutputError(f"{path} exists; give another name, or remove it first")
    write_whole(writable_file(path), RECIPE.replace("{name}", path.name).encode())
