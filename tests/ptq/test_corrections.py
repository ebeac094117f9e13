"""Statistics of batch normalisations, taken anew with quantized weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError
from fakequant.ptq import reestimate_batch_norm
from tests.support.bits import assert_same_bits, unchanged
from tests.support.functional_models import Calls


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.LazyLinear(4), nn.BatchNorm1d(4)),
    )
    for _ in range(20):
        model(torch.randn(16, 3, 7, 7))
    return model.eval()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 7, 7, generator=generator) * size**0.5 for size in (1, 5, 16, 2)]


def prepared() -> nn.Sequential:
    model = fq.prepare(net(), fq.Config("test", (fq.Rule(weight="int2 per_channel(0)"),)))
    fq.calibrate(model, batches(), progress=False)
    return model


def test_every_normalisation_gets_what_its_statistics_say() -> None:
    model, seen = prepared(), {}
    before = copy.deepcopy(model.state_dict())
    model[3].train()
    assert reestimate_batch_norm(model, batches()) == ["1", "5", "8"]
    assert model[3].training
    model.eval()
    for place in (1, 5, 8):
        model[place].register_forward_hook(lambda norm, args, _: seen.setdefault(norm, []).append(args[0]))
    with torch.no_grad():
        for batch in batches():
            model(batch)
    for norm, inputs in seen.items():
        rows = torch.cat([x.movedim(1, -1).reshape(-1, x.shape[1]) for x in inputs]).double()
        torch.testing.assert_close(norm.running_mean, rows.mean(0).float(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(norm.running_var, rows.var(0).float(), rtol=1e-6, atol=0)
    for name, value in model.state_dict().items():
        if not name.endswith(("running_mean", "running_var")):
            assert_same_bits(value, before[name], name)


def test_the_output_comes_closer_to_that_of_the_float_model() -> None:
    x = torch.cat(batches())
    reference, model = net(), prepared()
    reestimate_batch_norm(reference, batches())
    with torch.no_grad():
        wanted = reference(x)
        before = float((model(x) - wanted).square().mean())
        reestimate_batch_norm(model, batches())
        assert float((model(x) - wanted).square().mean()) < 0.9 * before


def test_a_large_mean_does_not_cancel() -> None:
    norm = nn.BatchNorm1d(2)
    parts = [torch.randn(50, 2, generator=torch.Generator().manual_seed(seed)) * 1e-3 + 1000 for seed in range(4)]
    reestimate_batch_norm(norm, parts)
    torch.testing.assert_close(norm.running_var, torch.cat(parts).double().var(0).float(), rtol=1e-6, atol=0)


def test_what_no_batch_reaches_keeps_its_statistics() -> None:
    model = Calls(lambda m, x: m.other(m.used(x)), **{name: nn.BatchNorm1d(2) for name in ("used", "idle", "other")})
    model.other.running_mean = model.other.running_var = None
    assert reestimate_batch_norm(model, [torch.randn(4, 2)]) == ["used"]
    assert_same_bits(model.idle.running_var, torch.ones(2))


def test_a_normalisation_that_is_called_several_times_is_named() -> None:
    model, given = Calls(lambda m, x: m.norm(m.norm(x) ** 2), norm=nn.BatchNorm1d(2)), [torch.randn(32, 2)]
    with pytest.warns(CalibrationWarning, match="^norm is called several times in a batch: its earlier calls"):
        reestimate_batch_norm(model, given)
    first = model.norm.running_mean.clone()
    with pytest.warns(CalibrationWarning):
        reestimate_batch_norm(model, given)
    assert not torch.equal(model.norm.running_mean, first)


def test_what_is_refused_leaves_the_model_as_it_was() -> None:
    model, damaged = prepared(), batches()
    damaged[1][0, 0, 0, 0] = torch.nan
    for given, kind, said in (
        (damaged, CalibrationError, r"^1, batch 2: an input holds NaN or inf"),
        ([], CalibrationError, "needs batches, and got none"),
        (batches()[:1], CalibrationError, r"^8 got fewer than two positions"),
        (batches()[0], ConfigError, r"give a list: \[tensor\]"),
    ):
        with unchanged(model), pytest.raises(kind, match=said):
            reestimate_batch_norm(model, given)
    with pytest.raises(ConfigError, match="the model has no batch normalisation"):
        reestimate_batch_norm(nn.Linear(2, 2), batches())
    folded = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    folded = fq.qat.fold_batch_norm(fq.prepare(folded, "INT8_WEIGHT_ONLY"), batches()[1])
    with pytest.raises(ConfigError, match=r"folded into layers \(the first is 1\)"):
        reestimate_batch_norm(folded, batches())
