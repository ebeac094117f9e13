"""Writes the folder of a release that later versions must read: python tests/vectors/record_release.py

Run it once for each release, and never again for the same one: what it holds is what users have.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fakequant as fq
from fakequant.version import __version__

RELEASES = Path(__file__).with_name("releases")
PRESETS = "int8", "int8_affine", "fp8", "nvfp4", "mxfp4", "int4_group32", "nf4_weight_only", "gguf_q4_k"
IN_FLOATS = "int8", "int4_group32"
"""Those that are saved without packed codes, too."""


class Network(nn.Module):
    """A table, a convolution, linear layers and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(16, 32), nn.Conv1d(32, 32, 3, padding=1)
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(torch.relu(self.up(x)))


def record() -> None:
    folder = RELEASES / __version__
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    net, batches = Network().eval(), [torch.randint(0, 16, (4, 8)) for _ in range(3)]
    save_file(net.state_dict(), folder / "float.safetensors")
    results = {"batch": batches[0]}
    for preset in PRESETS:
        again = Network().eval()
        again.load_state_dict(net.state_dict())
        fq.prepare(again, preset, batches[0], target="onnxruntime" if preset == "int8" else None)
        fq.calibrate(again, batches, progress=False)
        fq.save(again, folder / f"{preset}-packed", packed=True)
        if preset in IN_FLOATS:
            fq.save(again, folder / preset)
        with torch.no_grad():
            results[preset] = again(batches[0])
    save_file(results, folder / "results.safetensors")


if __name__ == "__main__":
    record()
