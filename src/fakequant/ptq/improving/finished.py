"""What `improve` has chosen so far, in a folder: a run that was ended goes on from there."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant.data.again import unchanged
from fakequant.data.batches import KeptBatches
from fakequant.data.digest import NoDigestError, digest
from fakequant.errors import CheckpointError, ConfigError
from fakequant.files import read_whole, remove_abandoned, writable_folder, write_whole
from fakequant.model.modes import disabled, evaluating
from fakequant.model.run.outputs import named_tensors
from fakequant.model.state.json_values import value_of
from fakequant.nn.products.product import MatrixProduct
from fakequant.nn.transforms import InputTransform, make_transform
from fakequant.numerics.qparams import QParams
from fakequant.ptq.results import LayerResult
from fakequant.ptq.solvers.layer import Choice
from fakequant.version import __version__

_SUFFIX = ".layer"
_DAMAGE = (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, ConfigError, pickle.PickleError)
"""Errors that a file of another content raises, even if its digest is right."""
_DIGEST = hashlib.sha256().digest_size


class InputChoice(NamedTuple):
    """What was chosen for the input of layers that get one tensor.

    Attributes:
        transform: None where none was chosen.
        params: of the quantizer; None where they stay.
        left: by step, the share of the error of the layers' outputs that is left after it.
    """

    transform: InputTransform | None
    params: QParams | None
    left: dict[str, float]

    def values(self) -> dict[str, Any]:
        """What it is made of, on the CPU."""
        transform, cpu = self.transform, torch.device("cpu")
        state = {} if transform is None else {name: value.to(cpu) for name, value in transform.state_dict().items()}
        return {
            "transform": transform and (transform.kind, transform.options(), state),
            "input": self.params and _on(self.params[:2], cpu)[:2],
            "left": self.left,
        }

    @classmethod
    def of(cls, values: Mapping[str, Any], product: MatrixProduct) -> InputChoice:
        """The choice with these values, on the device of a weight."""
        transform, params, left = None, values["input"], value_of(values["left"], "left", dict[str, float])
        if values["transform"] is not None:
            kind, options, state = values["transform"]
            transform = make_transform(kind, product.layer, **options)
            transform.load_state_dict(state)
        return cls(transform, None if params is None else _on(params, product.tensor.device), left)


class Finished:
    """The chosen layers of a run, one file for each; files are written whole or not at all.

    Args:
        folder: None keeps nothing.
        run: what the run depends on, by name, as texts. A folder that holds another run is refused.

    Raises:
        CheckpointError: the folder holds another run, or a damaged file.
        OutputError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, run: Mapping[str, str]) -> None:
        self._folder = None if folder is None else writable_folder(folder)
        self._run = dict(run)
        if self._folder is not None:
            for path in sorted(self._folder.glob(f"*{_SUFFIX}"))[:1]:
                self._read(path)

    def get(self, number: int, name: str, product: MatrixProduct) -> tuple[InputChoice, Choice] | None:
        """What was chosen for a layer as the number-th one, or None.

        Raises:
            CheckpointError: the file is damaged, or holds another layer.
        """
        if self._folder is None or not (path := self._path(self._folder, number)).exists():
            return None
        found = self._read(path)
        if (held := found.get("name")) != name:
            raise CheckpointError(f"{path} holds the layer {held!s:.80}, and {name} is next; give another folder")
        try:
            device, values, bias = product.tensor.device, found["values"], found["bias"]
            if values.shape != product.tensor.shape or not values.is_floating_point():
                raise ValueError(f"values of shape {list(values.shape)} for a weight of {list(product.tensor.shape)}")
            own, place = product.bias
            if bias is not None and (own is None or bias.shape != own[place].shape):
                raise ValueError("the change of a bias has another shape")
            chosen = Choice(
                _on(found["params"], device),
                values.to(device),
                None if bias is None else bias.to(device),
                value_of(found["result"], "result", LayerResult),
            )
            return InputChoice.of(found, product), chosen
        except _DAMAGE as error:
            raise CheckpointError(f"{path} is damaged: {error}; remove it, and its layer is chosen again") from error

    def put(self, number: int, name: str, own: InputChoice, choice: Choice) -> None:
        """Keep what was chosen for a layer."""
        if self._folder is None:
            return
        values = {
            "run": self._run,
            "name": name,
            **own.values(),
            "params": choice.params[:2],
            "values": choice.values,
            "bias": choice.bias,
            "result": asdict(choice.result),
        }
        buffer = io.BytesIO()
        torch.save(values, buffer)
        data = buffer.getvalue()
        write_whole(self._path(self._folder, number), hashlib.sha256(data).digest() + data)

    @staticmethod
    def _path(folder: Path, number: int) -> Path:
        return folder / f"{number:05}{_SUFFIX}"

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            data = read_whole(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; give another folder") from error
        if not _is_whole(data):
            raise CheckpointError(f"{path} is damaged; remove it, and its layer is chosen again")
        try:
            found = torch.load(io.BytesIO(data[_DIGEST:]), map_location="cpu", weights_only=True)
            held = {**found["run"]}
        except _DAMAGE as error:
            raise CheckpointError(
                f"{path} holds no chosen layer ({type(error).__name__}); give another folder"
            ) from error
        if other := [what for what in self._run if held.get(what) != self._run[what]]:
            other = [what for what in other if what != _OUTPUT] or other  # it follows from the others
            raise CheckpointError(
                f"{path.parent} holds a run of improve with {_listed(other)}; continue with what it had, or give "
                "another folder"
            )
        return found


def remove_finished(folder: Path) -> None:
    """Remove the layers that a run of `improve` keeps in a folder, and the folder if nothing else is in it."""
    with suppress(OSError):
        remove_abandoned(folder)
        for path in folder.glob(f"*{_SUFFIX}"):
            if path.is_file() and _is_whole(path.read_bytes()):
                path.unlink()
        folder.rmdir()


def _is_whole(data: bytes) -> bool:
    """Whether the content of a file begins with the digest of the rest, as those of `Finished` do."""
    return hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]


def _listed(names: list[str]) -> str:
    return " and ".join(f"another {name}" for name in names)


def _on(params: tuple[Tensor, Tensor | None], device: torch.device) -> QParams:
    scale, zero_point = params
    return QParams(scale.to(device), None if zero_point is None else zero_point.to(device))


_OUTPUT = "output in float, by an attribute of the model, inputs= or forward="


def run_of(model: nn.Module, batches: KeptBatches, steps: Iterable[str] = ()) -> dict[str, str]:
    """What a run of `improve` or `compare` depends on, as texts.

    Attributes, functions and buffers that are not stored are in no state: the output of the first batch stands for
    them.

    Args:
        model: before the run.
        batches: all of them.
        steps: their names.

    Raises:
        NoDigestError: a batch holds an object that is not plain.

    >>> from fakequant.data.batches import Batches
    >>> net = nn.Linear(2, 2)
    >>> one, other = (run_of(net, Batches([x], "improve").kept()) for x in (torch.ones(2), torch.zeros(2)))
    >>> [what for what in one if one[what] != other[what]][0]
    'set of batches'
    """
    try:
        of_batches = digest([*batches])
    except NoDigestError as error:
        raise NoDigestError(f"in a batch, {error}, or leave out the folder or file") from error
    with unchanged(model), evaluating(model), disabled(model), torch.no_grad():
        torch.manual_seed(0)
        output = batches.run_first(model)
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {
        "version of fakequant": __version__,
        "model": digest([repr(model), *state.items()]),
        "set of batches": of_batches,
        "list of steps": ", ".join(steps),
        "mask": digest([mask for mask in batches.masks.values() if mask is not None]),
        _OUTPUT: _of_output(output),
    }


def _of_output(output: Any) -> str:
    try:
        return digest(output)
    except NoDigestError:  # such as a cache beside the logits
        return digest(named_tensors(output))
