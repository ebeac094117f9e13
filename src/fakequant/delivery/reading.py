"""Read a file of another program into a prepared model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fakequant.data.arguments import check_model, refuse_prepared
from fakequant.delivery.format import DeliveryFormat, format_of
from fakequant.delivery.places import float_names, places_of
from fakequant.errors import CheckpointError
from fakequant.files import check_path
from fakequant.model.state.applying import apply_from
from fakequant.model.state.snapshots import Made, QuantizedState
from fakequant.nn.paths import join, module_at
from fakequant.nn.transforms import first_weights, make_transform

_CALL = "read('folder', model)"


def read(path: str | os.PathLike[str], model: nn.Module | None = None, *, dequantize: bool = False) -> nn.Module:
    """Read a file or folder into a prepared model, which can be analyzed, improved and trained further.

    Args:
        path: a file or folder of a format of `fakequant.delivery.delivery_formats()`.
        model: a fresh float model of the architecture; it is changed in place and returned. Default: a transformers
            model in eval mode, made from the file's configuration.
        dequantize: return a float model with the dequantized weights, which can be quantized in another way. Its
            activations are float. Transforms of inputs, such as GPTQ's permutation, are folded into the weights.

    Raises:
        CheckpointError: no such file, an unknown format, a damaged file, or another architecture.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(64, 64)), "fp8", skip=[])
    >>> used = calibrate(model, [torch.ones(1, 64)])
    >>> with TemporaryDirectory() as folder:
    ...     again = read(deliver(model, folder, "compressed-tensors"), nn.Sequential(nn.Linear(64, 64)))
    >>> print(again[0].weight_quantizer.spec)
    float8_e4m3fn per_channel(0)
    """
    check_path(path, _CALL, CheckpointError)
    if model is not None:
        check_model(model, "read", _CALL, CheckpointError)
        refuse_prepared(model, "read")
    source = Path(path)
    format = format_of(source)
    with _damage(format, source):
        built = format.build(source) if model is None else model

    def state(_: bool) -> tuple[QuantizedState, str]:
        found = decoded(format, source, built)
        return _dequantized(built, found) if dequantize else found, ""

    return apply_from(built, state)


@torch.no_grad()
def _dequantized(model: nn.Module, state: QuantizedState) -> QuantizedState:
    """The state of a float model with the values of a state."""
    found = {name: state.tensors[name] for name in float_names(model) if name in state.tensors}
    places = places_of(model)
    for name in state.weights:
        place, held = places[name], state.weights[name]
        held.check()
        found[name], entry = held.values(), state.layers[place.path].transform
        layer = module_at(model, place.path)
        if entry is not None and name.rpartition(".")[2] in first_weights(layer):
            transform = make_transform(entry.kind, layer, **entry.options)
            prefix = f"{join(place.path, '_input_transform')}."
            own = {key.removeprefix(prefix): state.tensors[key] for key in state.tensors if key.startswith(prefix)}
            transform.load_state_dict(own)
            found[name] = transform.out_of_weight(layer, found[name])
    return QuantizedState(tensors=found, shared=state.shared, versions=state.versions)


def decoded(format: DeliveryFormat, path: Path, model: nn.Module) -> QuantizedState:
    """The state in a file or folder; each access reads its tensors.

    Raises:
        CheckpointError: the file is damaged; an access may raise it, too.
    """
    with _damage(format, path):
        state = format.decode(path, model)
    tensors, weights = (
        Made({name: _damage(format, path)(partial(held.__getitem__, name)) for name in held})
        for held in (state.tensors, state.weights)
    )
    return replace(state, tensors=tensors, weights=weights)


@contextmanager
def _damage(format: DeliveryFormat, path: Path) -> Iterator[None]:
    """A context that adds the file's name to the reader's error."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # of code that reads damaged files: any
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is no {format.name}, or it is damaged: {what}") from error
