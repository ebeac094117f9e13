"""Inputs of products as llama.cpp quantizes them: its rules by numpy, and its logits."""

import numpy as np
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.delivery import deliver
from fakequant.delivery.gguf.activations import as_llama_cpp_has, llama_cpp_inputs
from fakequant.delivery.gguf.blocks import LAYOUTS
from fakequant.delivery.gguf.lattices import spec_of
from fakequant.delivery.gguf.llama_cpp import LlamaCpp
from fakequant.errors import ExportError
from tests.support import llama_cpp
from tests.support.language_models import language_model

IDS = torch.arange(8).reshape(1, 8) * 29 % 320


def by_numpy(x, block):
    """`quantize_row_q8_0` for AVX and `quantize_row_q8_K_ref`, as their sources have them."""
    values = x.numpy().reshape(-1, block)
    found = np.zeros_like(values)
    for row, out in zip(values, found, strict=True):
        place = np.abs(row).argmax()
        if row[place] == 0:
            continue
        if block == 32:
            amax = np.abs(row[place])
            out[:] = np.rint(row * (np.float32(127) / amax)) * np.float32(np.float16(amax / np.float32(127)))
        else:
            scale = np.float32(-127) / row[place]
            out[:] = np.minimum(127, np.rint(row * scale)) * (np.float32(1) / scale)
    return torch.from_numpy(found).reshape(x.shape)


@pytest.mark.parametrize("block", [32, 256])
def test_the_rules_are_those_of_the_sources(block):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 4, 64)[:, None]
    x[3], x[4, :256], x[5] = 0, 0, 1.5  # all zero, half of a row, all of one size
    x[6] = torch.randint(-4, 5, (512,)) / 8.0  # ties
    assert torch.equal(as_llama_cpp_has(x, block), by_numpy(x, block))


def test_gradients_pass_and_the_model_is_as_before_after_the_context():
    model = fq.prepare(nn.Sequential(nn.Linear(32, 8)), "gguf_q8_0", skip=[])
    x = torch.randn(4, 32, requires_grad=True)
    before = model(x)
    with llama_cpp_inputs(model):
        within = model(x)
    assert not torch.equal(within, before)
    assert torch.equal(within, model(as_llama_cpp_has(x, 32)))
    assert torch.equal(torch.autograd.grad(within.sum(), x)[0], torch.autograd.grad(before.sum(), x)[0])
    assert torch.equal(model(x), before)


def test_a_weight_that_llama_cpp_cannot_have_is_named_and_no_layer_is_changed():
    model = fq.prepare(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)), "gguf_q8_0", skip=[], rules={"1": "int8"})
    fq.calibrate(model, [torch.randn(4, 32)], progress=False)
    before = model(torch.ones(1, 32))
    message = r"llama.cpp cannot have 1\.weight: no type of GGUF is int8 per_channel"
    with pytest.raises(ExportError, match=message), llama_cpp_inputs(model):
        pass
    assert torch.equal(model(torch.ones(1, 32)), before)


# The others round the sum of every block of inputs, too.
@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind not in ("Q4_1", "Q5_1")])
@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
def test_llama_cpp_computes_these_logits(kind, tmp_path):
    llama_cpp.bindings()
    rules = [fq.Rule("*", weight=fq.TensorConfig(spec_of(kind)))]
    model = fq.prepare(language_model("llama", num_hidden_layers=1), fq.Config("own rules", rules), skip=[])
    theirs = LlamaCpp(deliver(model, tmp_path, "gguf"))(IDS)["logits"][0].numpy()
    with torch.no_grad(), llama_cpp_inputs(model):
        ours = model(IDS).logits[0].numpy()
    with torch.no_grad():
        weights_only = model(IDS).logits[0].numpy()
    peak = np.abs(ours).max()
    far = np.abs(ours - theirs).max(1) / peak
    assert np.abs(weights_only - theirs).max() / peak > 1e-3
    # Where the sums of both programs lie on two sides of a tie, one code differs, and what follows from it.
    assert (far <= 1e-5).sum() >= 6
    assert far.max() <= 0.02
    assert (ours.argmax(1) == theirs.argmax(1)).all()
