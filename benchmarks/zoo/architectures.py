"""All architectures, by name."""

from __future__ import annotations

from . import of_more, of_timm, of_torch, of_torchvision, of_transformers
from .architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    one.name: one
    for library in (of_transformers, of_torchvision, of_timm, of_torch, of_more)
    for one in library.ARCHITECTURES
}
