"""How models are called with batches: labels are left out, wrappers are looked through, guesses are refused."""

import copy
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from fakequant import ir, ptq
from fakequant.data.batches import example_arguments, run_batch, select_inputs
from fakequant.errors import CalibrationError, ConfigError, CoverageWarning
from fakequant.export import export_onnx
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.prepare import prepare
from fakequant.model.sensitivity import layer_sqnr, sensitivity
from fakequant.model.summary import summary, unquantized
from fakequant.model.training.qat import Schedule, finetune

X, LABELS, MASK = torch.linspace(-1, 1, 8).view(2, 4), torch.zeros(2, dtype=torch.long), torch.full((2, 4), 2.0)


class Masked(nn.Module):
    """A model with optional arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        y = self.linear(x if mask is None else x * mask)
        return y if bias is None else y + bias


class Echo(nn.Module):
    """Returns what it is called with."""

    def forward(self, x: Any, y: Any, /, z: Any = None) -> tuple[Any, ...]:
        return x, y, z


class AnyNumber(nn.Module):
    """Takes any number of arguments, and happens to have a module of the name that wrappers give."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 3)

    def forward(self, *parts: Tensor) -> Tensor:
        return self.module(torch.stack(parts).sum(0))


class AnyKeywords(AnyNumber):
    """Takes keywords too, as wrappers do."""

    def forward(self, *parts: Tensor, **named: Tensor) -> Tensor:
        return super().forward(*parts, *named.values())


@pytest.fixture
def one_process() -> Iterator[None]:
    if not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "averaged": AveragedModel,
    "distributed": nn.parallel.DistributedDataParallel,
    "averaged, compiled": lambda model: torch.compile(AveragedModel(model), backend="eager"),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_labels_do_not_reach_a_wrapped_model(wrap: Callable[[nn.Module], Any]) -> None:
    plain = prepare(nn.Sequential(nn.Linear(4, 3)), presets.INT8)
    model, batches = wrap(copy.deepcopy(plain)), [(X, LABELS)]
    calibrate(plain, [X])
    calibrate(model, batches)
    assert torch.equal(run_batch(model, batches[0]), model(X))
    assert list(layer_sqnr(model, batches).values()) == list(layer_sqnr(plain, [X]).values())
    assert sensitivity(model, batches)[0].value == sensitivity(plain, [X])[0].value
    assert len(finetune(model, batches, nn.functional.cross_entropy, Schedule(0.1, 1))) == 1


@pytest.mark.parametrize("cls", [AnyNumber, AnyKeywords])
def test_a_model_with_any_number_of_arguments_gets_all_of_them(cls: type[nn.Module]) -> None:
    model = cls()
    assert torch.equal(run_batch(model, (X, X)), model(X, X))


def test_items_beyond_the_parameters_are_left_out() -> None:
    assert run_batch(Echo(), (1, 2)) == (1, 2, None)
    assert run_batch(Echo(), (1, 2, 3, 4)) == (1, 2, 3)
    model = Masked()
    assert torch.equal(run_batch(model, (X,)), model(X))
    assert torch.equal(run_batch(model, (X, MASK, X[:, :3], LABELS)), model(X, MASK, X[:, :3]))
    assert torch.equal(run_batch(model, (X, MASK, None)), model(X, MASK))  # None is no label


@pytest.mark.parametrize("batch", [(X, LABELS), [X, LABELS], (X, MASK, LABELS)], ids=["tuple", "list", "two"])
def test_an_item_that_may_be_labels_or_an_optional_argument_is_refused(batch: Any) -> None:
    model = prepare(Masked(), presets.INT8)
    with pytest.raises(ConfigError, match=rf"tuple of {len(batch)} items, but forward needs only 1: .* dicts of arg"):
        calibrate(model, [batch])
    with pytest.raises(
        ConfigError, match=r"If it is labels, pass inputs=0; if it is an argument, pass inputs=slice\(2\)"
    ):
        calibrate(model, LOADER)
    calibrate(model, [{"x": X, "mask": MASK}])
    calibrate(model, [batch], forward=lambda model, batch: model(batch[0]))


def test_targets_are_known_so_that_fine_tuning_fills_optional_arguments() -> None:
    seen = []
    model = prepare(Masked(), presets.INT8)
    calibrate(model, [X])
    model.register_forward_pre_hook(lambda _, args: seen.append(args))
    finetune(model, [(X, MASK, LABELS)], nn.functional.cross_entropy, Schedule(0.1, 1))
    assert len(seen[0]) == 2
    assert torch.equal(seen[0][1], MASK)


def test_any_mapping_holds_keyword_arguments() -> None:
    model = Masked()
    assert torch.equal(run_batch(model, UserDict(x=X, mask=MASK)), model(X, MASK))


LOADER = [(X, LABELS)]
CHOICES = {
    "index": (0, (X, LABELS)),
    "index from the end": (-2, (X, LABELS)),
    "slice": (slice(1), [X, LABELS]),
    "function to a tuple": (lambda batch: (batch[0],), (X, LABELS)),
    "function to one argument": (lambda batch: batch["image"], {"image": X, "label": LABELS}),
    "function to keywords": (lambda batch: {"x": batch["image"]}, {"image": X, "label": LABELS}),
    "mapping in a tuple": (0, ({"x": X}, LABELS)),
}


@pytest.mark.parametrize(("inputs", "batch"), CHOICES.values(), ids=CHOICES)
def test_inputs_say_which_part_of_a_batch_the_model_gets(inputs: Any, batch: Any) -> None:
    plain, model = (prepare(Masked(), presets.INT8) for _ in range(2))
    calibrate(plain, [X])
    calibrate(model, [batch], inputs=inputs)
    assert list(layer_sqnr(model, [batch], inputs=inputs).values()) == list(layer_sqnr(plain, [X]).values())
    assert sensitivity(model, [batch], inputs=inputs) == sensitivity(plain, [X])
    assert unquantized(model, batch, inputs=inputs) == unquantized(plain, X)
    assert str(summary(model, batch, inputs=inputs)) == str(summary(plain, X))
    cross_entropy = nn.functional.cross_entropy
    history = finetune(model, [batch], cross_entropy, Schedule(0.1, 1), targets="label", inputs=inputs)
    assert history == finetune(plain, LOADER, cross_entropy, Schedule(0.1, 1))


def test_leading_items_are_positional_arguments() -> None:
    seen = []
    model = prepare(Masked(), presets.INT8)
    model.register_forward_pre_hook(lambda _, args: seen.append(args))
    calibrate(model, [(X, MASK, LABELS)], inputs=slice(2))
    assert [len(args) for args in seen] == [2]
    assert select_inputs(([X, X], LABELS), 0) == ([X, X],)  # a list of images is one argument


def test_exports_and_graphs_take_a_loaders_batch(tmp_path: Path) -> None:
    model = prepare(Masked(), "INT8_WEIGHT_ONLY")
    given, chosen = tmp_path / "given.onnx", tmp_path / "chosen.onnx"
    export_onnx(model, X, given)
    export_onnx(model, (X, LABELS), chosen, inputs=0)
    assert chosen.read_bytes() == given.read_bytes()
    assert str(ir.capture(model, (X, LABELS), inputs=0)) == str(ir.capture(model, X))


def test_a_packed_sequence_is_one_argument() -> None:
    packed = pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    model = prepare(nn.Sequential(nn.LSTM(4, 4, batch_first=True)), presets.INT8)
    calibrate(model, [packed])
    assert torch.equal(run_batch(model, packed)[0].data, model(packed)[0].data)
    assert example_arguments(packed) == ((packed,), {})


def test_the_coverage_warning_looks_at_the_inputs_alone() -> None:
    class Doubled(Masked):
        def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
            return super().forward(x, mask, bias) @ torch.eye(3)

    with pytest.warns(CoverageWarning, match="matmul"):
        prepare(Doubled(), presets.INT8, (X, LABELS), inputs=0)


@pytest.mark.parametrize(
    ("inputs", "batch", "message"),
    [
        (2, (X, LABELS), "inputs=2, but a batch is a tuple of 2 items"),
        (0, X, "items of a tuple or list, but a batch is a Tensor; leave inputs out"),
        (slice(1), {"x": X, "y": LABELS}, "a batch is a dict with the keys x, y; .*a function such as"),
        ("x", {"x": X}, "inputs must be an index, a slice or a function of a batch, got 'x'"),
        (True, (X,), "inputs must be an index, a slice or a function of a batch, got True"),
    ],
)
def test_wrong_inputs_are_refused(inputs: Any, batch: Any, message: str) -> None:
    model = prepare(Masked(), presets.INT8)
    with pytest.raises(ConfigError, match=message):
        calibrate(model, [batch], inputs=inputs)


class Features(nn.Module):
    """Takes a dict as its one argument, as SentenceTransformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features: dict[str, Tensor], **options: Any) -> Tensor:
        return self.linear(features["x"])


@pytest.mark.parametrize(
    "call",
    [
        lambda: prepare(Features(), presets.INT8, {"x": X}),
        lambda: calibrate(prepare(Features(), presets.INT8), [{"x": X}]),
        lambda: calibrate(prepare(Features(), presets.INT8), [({"x": X}, LABELS)], inputs=0),
        lambda: calibrate(prepare(Masked(), presets.INT8), [{"x": X, "modality": "text"}]),
    ],
    ids=["example", "batch", "item", "key"],
)
def test_a_dict_that_forward_does_not_take_says_how_a_dict_is_taken(call: Callable[[], Any]) -> None:
    said = r"inputs= chooses among its keys, and a tuple, \(dict,\), passes it whole$"
    with pytest.raises((ConfigError, CalibrationError), match=said):
        call()


def test_a_dict_in_a_tuple_is_given_whole() -> None:
    model = prepare(Features(), presets.INT8, ({"x": X},))
    calibrate(model, [({"x": X},)])
    assert model.linear.input_quantizer.scale.item() > 0


def test_inputs_and_forward_say_the_same_thing_twice() -> None:
    model = prepare(Masked(), presets.INT8)
    with pytest.raises(ConfigError, match="inputs= and forward= both say"):
        calibrate(model, LOADER, inputs=0, forward=lambda model, batch: model(batch[0]))


class Stream(IterableDataset[Any]):
    """A data set whose length is not known, as those of Hugging Face that stream."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(torch.linspace(-1, 1, 32).view(8, 4), torch.zeros(8, 3), strict=True))


class Unwilling(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


class Endless(Stream):
    def __len__(self) -> int:
        return 2**80


class Own:
    """A loader of the user's."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(Stream(), 4))

    def __len__(self) -> int:
        raise NotImplementedError


STREAMS: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(Stream(), 4),
    "no length": lambda: DataLoader(Unwilling(), 4),
    "no number": lambda: DataLoader(Endless(), 4),
    "own": Own,
    "generator": lambda: (batch for batch in DataLoader(Stream(), 4)),
    "bounded": lambda: islice(cycle(DataLoader(Stream(), 4)), 2),
}


def ready() -> nn.Module:
    torch.manual_seed(0)
    model = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), presets.INT8)
    calibrate(model, list(DataLoader(Stream(), 4)), inputs=0)
    return model


TAKERS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "calibrate": lambda model, batches: calibrate(model, batches, inputs=0, progress=True) and model[0].input_quantizer,
    "sensitivity": lambda model, batches: sensitivity(model, batches, inputs=0),
    "layer_sqnr": lambda model, batches: layer_sqnr(model, batches, inputs=0),
    "finetune": lambda model, batches: finetune(model, batches, nn.functional.mse_loss, Schedule(1.0, 10)),
    "improve": lambda model, batches: ptq.improve(model, batches, inputs=0),
    "reconstruct": lambda model, batches: ptq.reconstruct(model, batches, inputs=0),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("taker", TAKERS)
def test_batches_of_any_iterable_give_what_a_list_gives(taker: str, stream: str) -> None:
    found = [TAKERS[taker](ready(), batches) for batches in (list(DataLoader(Stream(), 4)), STREAMS[stream]())]
    assert repr(found[1]) == repr(found[0])


@pytest.mark.parametrize("taker", ["calibrate", "sensitivity", "layer_sqnr"])
def test_a_stream_is_not_kept(taker: str) -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def stream() -> Iterator[Any]:
        for _ in range(6):
            alive.append(sum(one() is not None for one in seen))
            x = torch.randn(4, 4)
            seen.append(weakref.ref(x))
            yield x, LABELS
            del x

    TAKERS[taker](ready(), stream())
    assert len(alive) == 6
    assert max(alive) <= 1
