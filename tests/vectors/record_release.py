"""Writes the folder of a release that later versions must read: python tests/vectors/record_release.py

Run it once for each release, and never again for the same one: what it holds is what users have.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fakequant as fq
from fakequant.model.weights import quantized_weights
from fakequant.nn.quantizer import quantizers
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


def inputs_of(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """What each quantizer of an input gets in a run."""
    seen = dict[str, Tensor]()
    hooks = [
        quantizer.register_forward_pre_hook(
            lambda _, args, path=path: seen.update(
                {path: args[0].detach().clone(memory_format=torch.contiguous_format)}
            )
        )
        for path, quantizer in quantizers(model).items()
        if path not in quantized_weights(model)
    ]
    with torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()
    return seen


def digests(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, str]:
    """A digest of what each quantizer gives for its weight or input: sums of products differ from CPU to CPU."""
    given = inputs | {path: product.parameter for path, product in quantized_weights(model).items()}
    with torch.no_grad():
        values = {path: quantizer(given[path]) for path, quantizer in quantizers(model).items()}
    return {path: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() for path, value in values.items()}


def record() -> None:
    folder = RELEASES / __version__
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    net, batches = Network().eval(), [torch.randint(0, 16, (4, 8)) for _ in range(3)]
    save_file(net.state_dict(), folder / "float.safetensors")
    inputs, results = dict[str, Tensor](), dict[str, dict[str, str]]()
    for preset in PRESETS:  # the first one has a quantizer wherever the others have one
        again = Network().eval()
        again.load_state_dict(net.state_dict())
        fq.prepare(again, preset, batches[0], target="onnxruntime" if preset == "int8" else None)
        fq.calibrate(again, batches, progress=False)
        fq.save(again, folder / f"{preset}-packed", packed=True)
        if preset in IN_FLOATS:
            fq.save(again, folder / preset)
        inputs = inputs or inputs_of(again, batches[0])
        results[preset] = digests(again, inputs)
    save_file(inputs, folder / "inputs.safetensors")
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    record()
