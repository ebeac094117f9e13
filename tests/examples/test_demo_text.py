import math

import pytest
import torch
from torch import nn

import fakequant as fq
from examples.demo import text


def written(folder, names):
    for number, name in enumerate(names):
        (folder / name).write_bytes(bytes([number]))
    return folder


def test_a_name_alone_says_which_part_a_file_belongs_to(tmp_path):
    names = ["copy.py", "dis.py", "os.py", "glob.py"]  # development, held out, training, development
    (tmp_path / "other.txt").write_text("not read")
    corpus = text.load_corpus(written(tmp_path, names))
    parts = corpus.training, corpus.development, corpus.held_out
    assert [part.tolist() for part in parts] == [[2], [0, 10, 3], [1]]  # byte 10 is the newline between two files
    more = text.load_corpus(written(tmp_path, [*names, "abc.py"]))
    assert torch.equal(more.development, corpus.development)
    assert torch.equal(more.held_out, corpus.held_out)
    assert more.training.tolist() == [4, 10, 2]


def test_a_folder_with_too_few_files_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"has no \.py file for development, held_out; give a folder with more"):
        text.load_corpus(written(tmp_path, ["os.py"]))


def test_the_standard_library_is_there():
    corpus = text.load_corpus()
    assert len(corpus.training) > 1_000_000
    assert len(corpus.development) > 50_000
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


def test_training_lowers_the_loss_and_fits_in_place():
    data = torch.arange(5000) % 7
    corpus = text.Corpus(data, data, data)
    model = text.train(corpus, 12, features=16)
    assert not model.training
    before = text.nats_per_byte(model, data, windows=16)
    assert before < math.log(256) - 1
    optimizer = text.adamw(model.parameters(), 5e-3)
    rates = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    text.fit(model, text.Windows(data, 12), optimizer, rates)
    assert text.nats_per_byte(model, data, windows=16) < before
    assert not model.training


def test_taught_windows_carry_the_logits_of_their_teacher():
    torch.manual_seed(0)
    data = torch.arange(1000) % 256
    teacher = text.Transformer(features=16).eval()
    taught = text.Taught(text.Windows(data, 2), teacher)
    assert len(taught) == 2
    for (windows, logits), (same, _) in zip(taught, text.Windows(data, 2), strict=True):
        assert torch.equal(windows, same)
        assert torch.equal(logits, teacher(windows))
        assert not logits.requires_grad


def test_divergence_from_a_teacher():
    torch.manual_seed(0)
    logits, taught = torch.randn(2, 3, 256).double(), torch.randn(2, 3, 256).double()
    p, q = taught.softmax(-1), logits.softmax(-1)
    assert text.divergence(logits, taught).item() == pytest.approx((p * (p / q).log()).sum(-1).mean().item())
    assert text.divergence(taught, taught).item() == 0
