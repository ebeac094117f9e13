"""Calibration by several processes: two of them, with gloo, on one machine."""

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fakequant as fq
from fakequant.distributed import gather, gathered, is_sharded
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError
from fakequant.model.training.qat import Scales
from tests.support import ranks
from tests.support.attends import Attends
from tests.support.models import shared_out

pytestmark = ranks.needs_gloo


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches() -> list[Tensor]:
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) * (i + 1) for i in range(5)]


def of_rank(rank: int) -> list[Tensor]:
    """Unequal parts, and what is largest on the second one alone."""
    return batches()[:2] if rank == 0 else batches()[2:]


def scales(model: nn.Module) -> list[Tensor | None]:
    return [quantizer.scale for quantizer in fq.nn.quantizers(model).values()]


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = list(zip(scales(one), scales(other), strict=True))
    return all(a is b is None or (type(b) is Tensor and torch.equal(a, b)) for a, b in pairs)


def merges(rank: int, folder: Path) -> None:
    for method in ("max", "entropy", "mse", "percentile"):
        alone = fq.prepare(net(), "int8")
        expected = fq.calibrate(alone, batches(), method, group=False)
        wrapped = DistributedDataParallel(fq.prepare(net(), "int8"))
        found = fq.calibrate(wrapped, of_rank(rank), method)
        assert same(alone, wrapped), method
        for name, calibrator in expected.items():
            state = found[name].state_dict()
            assert all(torch.equal(value, state[key]) for key, value in calibrator.state_dict().items()), name
    alone, wrapped = fq.prepare(net(), "int8"), DistributedDataParallel(fq.prepare(net(), "int8"))
    by = {"by": lambda input: input.abs().max(), "bins": 2}  # the lower bin has no batch of the second process
    fq.calibrate(alone, batches(), group=False, **by)
    fq.calibrate(wrapped, of_rank(rank), **by)
    assert same(alone, wrapped)
    assert all(torch.equal(alone(x), wrapped(x)) for x in batches())
    given = fq.prepare(net(), "int8")
    fq.calibrate(given, of_rank(rank), group=dist.group.WORLD)
    alone = fq.prepare(net(), "int8")
    fq.calibrate(alone, batches(), group=False)
    assert same(given, alone)
    # What one process alone saw is seen.
    split = fq.prepare(net(), "int8")
    fq.calibrate(split, [batches()[0]], group=dist.group.WORLD, forward=lambda m, x: m[0](x) if rank else m(x))
    assert split[2]._input_quantizer.calibrated
    nothing = fq.prepare(net(), "int8")
    fq.calibrate(nothing, batches() if rank else [], group=dist.group.WORLD)
    assert same(nothing, alone)


def says(rank: int, folder: Path) -> None:
    model = fq.prepare(net(), "int8")
    with pytest.warns(CalibrationWarning, match=r"2 processes, and each works alone.*pass group=.*or group=False"):
        fq.calibrate(model, of_rank(rank))
    with warnings.catch_warnings(action="error"):
        fq.calibrate(model, of_rank(rank), group=False)
    nan = [*of_rank(rank), torch.full((4, 8), float("nan"))] if rank else of_rank(rank)
    fresh = fq.prepare(net(), "int8")
    text = "^0._input_quantizer: .* NaN" if rank else "the process of rank 1 failed, .* 0._input_quantizer: .* NaN"
    with pytest.raises(CalibrationError, match=text):
        fq.calibrate(fresh, nan, group=dist.group.WORLD)
    assert scales(fresh) == [None] * 4
    with pytest.raises(ConfigError, match="ranks 0 and 1 calibrate different quantizers"):
        fq.calibrate(fresh, of_rank(rank), group=dist.group.WORLD, pattern=str(2 * rank))
    with pytest.raises(CalibrationError, match="2 of 2 input quantizers saw no data"):
        fq.calibrate(fresh, [], group=dist.group.WORLD)
    # Before any batch runs: this one would fail.
    with pytest.raises(ConfigError, match=r"several processes .*'moving_average' cannot merge .*use one of entropy"):
        fq.calibrate(fresh, [torch.full((4, 8), float("nan"))], "moving_average", group=dist.group.WORLD)
    fq.calibrate(fq.prepare(net(), "int8"), of_rank(rank), "moving_average", group=False)
    with pytest.raises(ConfigError, match=r"group must be a process group .*, False or None, got 'all'"):
        fq.calibrate(fresh, of_rank(rank), group="all")
    fq.calibrate(fresh, of_rank(rank), group=dist.group.WORLD)
    with pytest.raises(ConfigError, match=r"call set_scales\(LEARNED\) on the model before you wrap it"):
        fq.qat.set_scales(DistributedDataParallel(fresh), Scales.LEARNED)
    fq.qat.set_scales(fresh, Scales.LEARNED)
    fq.qat.set_scales(DistributedDataParallel(fresh), Scales.LEARNED)


def improves(rank: int, folder: Path) -> None:
    given = [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    own = given[:2] if rank == 0 else given[2:]
    for preset, steps in (("int4_weight_only", "fast"), ("int4_weight_only", ["ranges", "descend"]), ("int8", "fast")):
        model, alone = fq.prepare(net(), preset), fq.prepare(net(), preset)
        fq.calibrate(model, own, group=dist.group.WORLD, progress=False)
        fq.calibrate(alone, given, group=False, progress=False)
        judge = None if preset == "int8" else []  # two processes hold back other batches than one does
        found = fq.ptq.improve(model, own, steps, judge=judge, group=dist.group.WORLD, progress=False)
        both = gather([module.weight for module in model if isinstance(module, nn.Linear)], dist.group.WORLD)
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
        if preset != "int8":  # where inputs have ranges, the first process chooses them
            expected = fq.ptq.improve(alone, given, steps, judge=[], group=False, progress=False)
            assert all(torch.equal(a.weight, b.weight) for a, b in zip(model[::2], alone[::2], strict=True))
            assert [row.after for row in found.layers] == pytest.approx([row.after for row in expected.layers])
    refused_by_improve(rank, own, folder)


def improves_attention(rank: int, folder: Path) -> None:
    """Attention whose query, key and value come from one, two or three tensors."""
    given = [torch.randn(4, 7, 12, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    own = given[:2] if rank == 0 else given[2:]
    for tensors in ("aaa", "abb", "abc"):
        model, alone = (fq.prepare(Attends(tensors).eval(), "int4_weight_only") for _ in range(2))
        fq.ptq.improve(model, own, "fast", judge=[], group=dist.group.WORLD, progress=False)
        expected = Attends(tensors).eval()
        fq.ptq.improve(alone, given, "fast", judge=[], group=False, progress=False)
        for one, other, plain in zip(model.parameters(), alone.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other), tensors
            assert one.dim() != 2 or not torch.equal(one, plain), tensors  # codes were chosen


def refused_by_improve(rank: int, own: list[Tensor], folder: Path) -> None:
    model = fq.prepare(net(), "int4_weight_only")
    before = [p.clone() for p in model.parameters()]
    world = dist.group.WORLD
    with pytest.raises(ConfigError, match=r"checkpoint= is for a single process; leave checkpoint= out"):
        fq.ptq.improve(model, own, group=world, checkpoint=folder / "improve")
    early: tuple[tuple[Any, Any, str, str], ...] = (
        ([], "fast", "improve needs batches, and got none", "the process of rank 1 failed, .*improve needs batches"),
        (own, "fsat", "unknown steps 'fsat'", "the process of rank 1 failed, .*unknown steps"),
        (own, ["ranges"], "rank 0 differs at steps=", "rank 1 differs at steps="),
    )
    for batches, steps, here, there in early:
        given, asked = (batches, steps) if rank else (own, "fast")
        with pytest.raises((CalibrationError, ConfigError), match=here if rank else there):
            fq.ptq.improve(model, given, asked, group=world, progress=False)
    nan = [*own, torch.full((4, 8), float("nan"))] if rank else own
    text = "^0, batch 4: an input" if rank else "the process of rank 1 failed, .*: 0, batch 4: an input holds NaN"
    with pytest.raises(CalibrationError, match=text):
        fq.ptq.improve(model, nan, group=world, progress=False)
    with pytest.raises(ConfigError, match=r"the processes reach other layers, .*: rank [01] differs at 2"):
        fq.ptq.improve(model, own, group=world, forward=lambda m, x: m[0](x) if rank else m(x), progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def sharded(preset: str) -> nn.Sequential:
    return shared_out(fq.prepare(net(), preset))


def shards(rank: int, folder: Path) -> None:
    x = batches()[0]
    for preset, method in (("int8", "max"), ("int8", "mse"), ("int8_weight_only", "max"), ("nvfp4", "max")):
        alone = fq.prepare(net(), preset)
        fq.calibrate(alone, batches()[:4], weight_method=method, group=False)
        model = sharded(preset)
        fq.calibrate(model, batches()[rank:4:2], weight_method=method)
        assert same(alone, model)
        assert torch.equal(alone(x), model(x))
        assert is_sharded(model[0].weight)
        assert torch.equal(gathered(model[0].weight), alone[0].weight)
        fq.save(model, folder / preset / str(rank))
        assert torch.equal(fq.load(net(), folder / preset / str(rank))(x), alone(x))
    for fix in (fq.calibrate, lambda model: fq.qat.set_scales(model, Scales.FIXED)):
        alone, model = fq.prepare(net(), "int8_weight_only"), sharded("int8_weight_only")
        for one in (alone, model):
            fix(one)
        assert same(alone, model)
        assert torch.equal(alone(x), model(x))
    assert len(fq.summary(model).layers) == 2
    for refused in (
        lambda: fq.bake_weights(model),
        lambda: fq.summary(model, x),
        lambda: fq.export_onnx(model, x, folder / "model.onnx"),
        lambda: fq.qat.set_scales(model, Scales.LEARNED),
    ):
        with pytest.raises(ConfigError, match=r"weights are sharded over processes, the first is 0\.weight; .* before"):
            refused()


def failures_are_heard(rank: int, folder: Path) -> None:
    """Whatever one process alone gets wrong, both raise, and soon: none waits for the other."""
    world: Any = dist.group.WORLD
    own, nan = of_rank(rank), [torch.full((4, 8), float("nan"))]

    def broken() -> Any:
        yield batches()[0]
        raise RuntimeError("the disk is gone")

    def told(model: nn.Module, given: Any, text: str, **how: Any) -> None:
        """This happens in the second process alone, which says it; the first one hears of it."""
        begun, before = time.monotonic(), scales(model)
        with pytest.raises((CalibrationError, ConfigError, RuntimeError), match=text) as found:
            fq.calibrate(model, given if rank else batches()[:3], progress=False, **(how if rank else {"group": world}))
        assert rank or "the process of rank" in str(found.value)
        assert time.monotonic() - begun < 30
        assert [one is None for one in scales(model)] == [one is None for one in before]

    for make in (lambda: fq.prepare(net(), "int8"), lambda: sharded("int8")):
        told(make(), broken(), "the disk is gone", group=world)
        told(make(), [*own[:2], *nan], r"_input_quantizer: .* NaN", group=world)
        told(make(), own, "unknown method|'mx'", group=world, method="mx")
        told(make(), own, "no layer with a static quantizer matches", group=world, pattern="9*")
    # A sharded model has its weights in the calls of all processes alone.
    told(sharded("int8"), [], "the process of rank 1 has 0 batches, but others have more", group=world)
    for first, second in (("int8", "int8_per_token"), ("w8a8_dynamic", "mxfp8")):
        model = fq.prepare(net(), second if rank else first)
        with pytest.raises(ConfigError, match="ranks 0 and 1 calibrate different quantizers"):
            fq.calibrate(model, own, group=world, progress=False)
    fq.calibrate(model := fq.prepare(net(), "int8"), own, group=world, progress=False)
    checkpoint = {"checkpoint": folder / "one"} if rank else {}
    text = "is for a single process" if rank else "the process of rank 1 failed"
    with pytest.raises((CalibrationError, ConfigError), match=text):
        fq.ptq.improve(model, own, group=world, progress=False, **checkpoint)


def trains(rank: int, folder: Path) -> None:
    """The processes calibrate together, and those with other plans or errors are told apart before the first step."""
    training = fq.qat.Training("int8", of_rank(rank), scales=Scales.LEARNED)
    model, alone = training.prepare(net()), fq.prepare(net(), "int8")
    fq.calibrate(alone, batches(), group=False)
    fq.qat.set_scales(alone, Scales.LEARNED)
    assert all(map(torch.equal, model.parameters(), alone.parameters()))
    with pytest.raises(ConfigError, match="the processes quantize different layers, or quantize them in diff"):
        fq.qat.Training("int8", of_rank(rank), scales=Scales.EPOCH if rank else Scales.FIXED).prepare(net())
    text = "unknown method|the process of rank 1 failed"
    with pytest.raises((CalibrationError, ConfigError), match=text):
        fq.qat.Training("int8", of_rank(rank), scales=Scales.LEARNED, method="lqs" if rank else "lsq").prepare(net())
    own = fq.qat.Training("int8" if rank else "fp8", of_rank(rank), calibration={"group": False}).prepare(net())
    assert not same(own, alone)


def steps(rank: int, folder: Path) -> None:
    """FSDP2 after `prepare` and before it, against DDP: the same losses, scales and weights, and those of one file."""
    x = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    own = [batch[4 * rank : 4 * rank + 4] for batch in x]

    def losses(model: nn.Module) -> list[Tensor]:
        optimizer, found = torch.optim.AdamW(model.parameters(), 0.001), []
        for batch in own:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return found

    plans = [(preset, None) for preset in ("int8", "int8_per_token", "fp8", "int4_weight_only", "nvfp4", "gguf_q4_0")]
    plans += [("int8", method) for method in ("lsq", "lsq_plus", "pact", "tqt")] + [("int8_affine", "lsq_plus")]
    for number, (preset, method) in enumerate(plans):

        def prepared(preset: str = preset, method: str | None = method) -> nn.Sequential:
            model = fq.prepare(net(), preset)
            fq.calibrate(model, x, group=False, progress=False)
            fq.qat.set_scales(model, Scales.FIXED if method is None else Scales.LEARNED, method or "lsq")
            return model

        model, wrapped = shared_out(prepared()), DistributedDataParallel(prepared())
        expected = losses(wrapped)
        assert all(map(torch.equal, losses(model), expected)), (preset, method)
        for one, other in zip(model.parameters(), wrapped.parameters(), strict=True):
            assert torch.equal(gathered(one), other), (preset, method)
        if method is None:
            late = fq.prepare(shared_out(net()), preset)
            fq.calibrate(late, own, progress=False)
            fq.qat.set_scales(late, Scales.FIXED)
            assert all(map(torch.equal, losses(late), expected)), preset
        again = fq.load(net(), fq.save(model, folder / f"steps{number}-{rank}"))
        assert torch.equal(again.eval()(x[0]), model.eval()(x[0]))
        state = fq.snapshot(model)
        assert torch.equal(fq.apply(net(), state).eval()(x[0]), again(x[0]))
        joined = gather(list(again.parameters()), dist.group.WORLD)
        assert all(map(torch.equal, *joined))


def leaves(rank: int, folder: Path) -> None:
    """A process that ends by an error in a step with learned scales, and another one that is in the same step."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    model = DistributedDataParallel(fq.qat.Training("int8", of_rank(rank), scales=Scales.LEARNED).prepare(net()))
    model(batches()[0]).square().mean().backward()
    begun = time.monotonic()
    if rank:
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError):
        model(batches()[0]).square().mean().backward()
    (folder / "seconds").write_text(str(time.monotonic() - begun))


def test_two_processes(tmp_path):
    ranks.run((merges, says, shards, improves, improves_attention), tmp_path)


def test_a_step_that_fails_in_one_process_ends_in_the_other(tmp_path):
    spawned = [mp.get_context("spawn").Process(target=leaves, args=(rank, tmp_path)) for rank in range(2)]
    for process in spawned:
        process.start()
    for process in spawned:
        process.join(120)
    assert float((tmp_path / "seconds").read_text()) < 30


def test_an_error_of_one_process_is_one_of_both(tmp_path):
    ranks.run((failures_are_heard, trains), tmp_path)


def test_steps_of_sharded_models_are_those_of_copies(tmp_path):
    ranks.run((steps,), tmp_path)


def test_without_processes_a_group_is_an_error():
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialised"):
        fq.calibrate(fq.prepare(net(), "int8"), batches(), group=True)
    fq.calibrate(fq.prepare(net(), "int8"), batches(), group=False)


def test_a_plain_tensor_is_whole():
    tensor = torch.ones(2)
    assert gathered(tensor) is tensor
    assert not is_sharded(nn.Parameter(tensor))
