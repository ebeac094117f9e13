import math

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.demo import text


def test_every_tenth_file_is_held_out_in_the_order_of_names(tmp_path):
    for number in reversed(range(21)):
        (tmp_path / f"m{number:02}.py").write_bytes(bytes([number]))
    (tmp_path / "other.txt").write_text("not read")
    corpus = text.load_corpus(tmp_path)
    assert corpus.held_out.tolist() == [9, 10, 19]  # byte 10 is the newline between two files
    assert [byte for byte in corpus.training.tolist() if byte != 10] == [n for n in range(21) if n not in (9, 10, 19)]
    assert corpus.training.tolist().count(10) == 19  # 18 newlines and the one that file 10 holds


def test_the_standard_library_is_there():
    corpus = text.load_corpus()
    assert len(corpus.training) > 1_000_000
    assert len(corpus.held_out) > 50_000
    assert corpus.training.max() < 256


def test_windows_are_followed_by_the_next_bytes_and_repeat_with_their_seed():
    data = torch.arange(1000)
    first, again = list(text.Windows(data, 3)), list(text.Windows(data, 3))
    assert len(text.Windows(data, 3)) == len(first) == 3
    for (windows, following), (same, _) in zip(first, again, strict=True):
        assert windows.shape == following.shape == (text.BATCH, text.CONTEXT)
        assert torch.equal(following, windows + 1)
        assert torch.equal(windows, same)
    assert not torch.equal(first[0][0], first[1][0])


def test_no_byte_sees_what_follows_it():
    torch.manual_seed(0)
    model = text.Transformer(features=16, heads=2, blocks=2).eval()
    one = torch.randint(256, (1, text.CONTEXT))
    other = one.clone()
    other[0, 60:] = (other[0, 60:] + 1) % 256
    a, b = model(one), model(other)
    assert torch.equal(a[:, :60], b[:, :60])
    assert not torch.equal(a[:, 60:], b[:, 60:])


def test_nats_per_byte_of_a_model_that_knows_nothing():
    class Uniform(nn.Module):
        def forward(self, windows):
            return torch.zeros(*windows.shape, 256)

    assert text.nats_per_byte(Uniform(), torch.arange(5000) % 256, windows=40) == pytest.approx(math.log(256))


def test_attention_products_are_quantized():
    model = text.Transformer(features=32, heads=2, blocks=1)
    fq.prepare(model, fq.presets.NVFP4)
    names = set(fq.nn.quantizers(model))
    assert {f"blocks.0.attention.{product}._other_quantizer" for product in ("scores", "mix")} <= names
    assert model(torch.zeros(1, 7, dtype=torch.long)).isfinite().all()
