"""What ranges by timestep are worth: two diffusion models of diffusers, trained here on 8x8 digits.

    python -m benchmarks.timesteps [--seconds 60] [--page docs/notes/timesteps.md]

Needs `pip install diffusers scikit-learn`. The figures are those of one CPU thread and one seed.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq
from tests.support.vision import import_torchvision

WAYS: dict[str, dict[str, Any]] = {"one range": {}} | {
    f"{bins} bins": {"by": "timestep", "bins": bins} for bins in (4, 10)
}
FORMATS = ("int8", "int6", "int4")


class Task:
    """Digits with noise, and a model that finds the noise."""

    def __init__(self, kind: str) -> None:
        import_torchvision()
        from diffusers import DDIMScheduler, DDPMScheduler, DiTTransformer2DModel, UNet2DModel
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.kind, self.noise, self.steps = kind, DDPMScheduler(1000), DDIMScheduler(1000)
        self.images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
        self.labels = torch.tensor(digits.target)
        torch.manual_seed(0)
        if kind == "UNet2DModel":
            blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
            blocks |= {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "block_out_channels": (32, 64)}
            sizes: dict[str, Any] = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "norm_num_groups": 8}
            self.model: nn.Module = UNet2DModel(layers_per_block=1, **sizes, **blocks)
        else:
            sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "norm_num_groups": 8, "patch_size": 2}
            heads = {"num_attention_heads": 4, "attention_head_dim": 24, "num_layers": 4}
            self.model = DiTTransformer2DModel(**sizes, **heads, num_embeds_ada_norm=1000)

    def arguments(self, x: Tensor, times: Tensor, labels: Tensor) -> dict[str, Any]:
        if self.kind == "UNet2DModel":
            return {"sample": x, "timestep": times}
        return {"hidden_states": x, "timestep": times, "class_labels": labels}

    def batch(self, times: Tensor, generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
        """The arguments of a call, and the noise in it."""
        chosen = torch.randint(0, len(self.images), (len(times),), generator=generator)
        noise = torch.randn(len(times), 1, 8, 8, generator=generator)
        x = self.noise.add_noise(self.images[chosen], noise, times)
        return self.arguments(x, times, self.labels[chosen]), noise

    def train(self, seconds: float) -> None:
        rate, generator = 2e-3 if self.kind == "UNet2DModel" else 1e-3, torch.Generator().manual_seed(0)
        optimizer, start, done = torch.optim.AdamW(self.model.parameters(), rate), time.process_time(), 0.0
        while done < 1:
            arguments, noise = self.batch(torch.randint(0, 1000, (64,), generator=generator), generator)
            loss = (self.model(**arguments).sample - noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done = (time.process_time() - start) / seconds
            optimizer.param_groups[0]["lr"] = rate * max(1 - done, 1e-3)
        self.model.eval()

    def batches(self, count: int, rows: int, seed: int) -> list[dict[str, Any]]:
        """Batches of one timestep each."""
        generator, times = torch.Generator().manual_seed(seed), torch.linspace(0, 999, count).long()
        return [self.batch(t.expand(rows), generator)[0] for t in times]

    @torch.no_grad()
    def sampled(self, model: nn.Module) -> Tensor:
        """64 images of a loop of 50 steps."""
        self.steps.set_timesteps(50)
        x, labels = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(7)), torch.arange(64) % 10
        for t in self.steps.timesteps:
            x = self.steps.step(model(**self.arguments(x, t.expand(64), labels)).sample, t, x).prev_sample
        return x


def rows_of(kind: str, seconds: float) -> list[str]:
    task = Task(kind)
    task.train(seconds)
    given, held = task.batches(50, 16, 1), task.batches(40, 32, 2)
    with torch.no_grad():
        wanted, images = [task.model(**batch).sample for batch in held], task.sampled(task.model)
    found = []
    for format in FORMATS:
        config = fq.Config(
            format, (fq.Rule(input=fq.TensorConfig.parse(format), weight=fq.TensorConfig.parse("int8 per_channel(0)")),)
        )
        for way, how in WAYS.items():
            model = fq.prepare(deepcopy(task.model), config)
            fq.calibrate(model, given, progress=False, **how)
            with torch.no_grad():
                errors = [_error(model(**b).sample, y) for b, y in zip(held, wanted, strict=True)]
            parts = (errors, errors[:8], errors[-8:])
            figures = [*(sum(part) / len(part) for part in parts), _error(task.sampled(model), images)]
            found.append(f"| {kind} | {format} | {way} | {' | '.join(f'{100 * one:.3g}' for one in figures)} |")
            print(found[-1], flush=True)
    return found


def _error(x: Tensor, wanted: Tensor) -> float:
    return float((x - wanted).square().sum() / wanted.square().sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    rows = [row for kind in ("UNet2DModel", "DiTTransformer2DModel") for row in rows_of(kind, options.seconds)]
    if options.page is not None:
        before, _, _ = options.page.read_text().partition("| model |")
        head = "| model | activations | ranges | all | lowest | highest | images |\n|---|---|---|---|---|---|---|"
        options.page.write_text(f"{before}{head}\n" + "\n".join(rows) + "\n")
