"""A quantized model as data: its plan, its tensors, and its weights as codes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model, refuse_unprepared
from fakequant.distributed import is_sharded, whole
from fakequant.errors import CheckpointError
from fakequant.model.state.json_values import plain_of
from fakequant.model.state.plan import Plan, layer_entry, read_plan
from fakequant.model.state.stored_sites import sites_entry
from fakequant.model.state.weight_codes import QuantizedWeights, WeightCodes
from fakequant.model.unregistered import warn_of_new_layers, warn_unregistered
from fakequant.model.weights import give_values, quantized_weights, warn_stale_scales
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import quantizers
from fakequant.nn.ranges.fixed_codes import KEY
from fakequant.nn.stored.weight import StoredWeight, with_stored
from fakequant.nn.wrappers import unwraps
from fakequant.numerics.formats.codes import as_integers, integers_of
from fakequant.offload import fetched, offloaded

T = TypeVar("T")
Region = tuple[slice, ...]
"""A part of a tensor: a slice for each axis."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when it is written to a file or put into a model, and not kept.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        make: gives the tensor.
        make_part: gives a part of it, by a slice for each axis; None where only the whole can be made.

    >>> LazyTensor((2,), torch.float32, lambda: torch.ones(2)).part((slice(0, 1),))
    tensor([1.])
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    make_part: Callable[[Region], Tensor] | None = None

    @classmethod
    def of(cls, tensor: Tensor, make: Callable[[], Tensor] | None = None) -> LazyTensor:
        """One of the shape and dtype of a tensor, by default that tensor itself."""
        return cls(tuple(tensor.shape), tensor.dtype, make or (lambda: tensor))

    def part(self, region: Region) -> Tensor:
        """The part of the tensor in a region."""
        return self.make()[region] if self.make_part is None else self.make_part(region)

    def __repr__(self) -> str:
        return f"LazyTensor({list(self.shape)}, {self.dtype})"


class Made(Mapping[str, T]):
    """Values that functions make at each access, and that are not kept."""

    def __init__(self, makers: Mapping[str, Callable[[], T]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> T:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers


class LazyTensors(Made[Tensor]):
    """Tensors by name, of which some are made at each access and not kept."""

    def __init__(self, tensors: Mapping[str, Tensor | LazyTensor]) -> None:
        self.lazy = {name: LazyTensor.of(one) if isinstance(one, Tensor) else one for name, one in tensors.items()}
        super().__init__({name: one.make for name, one in self.lazy.items()})


def lazy(tensors: Mapping[str, Tensor], name: str) -> LazyTensor:
    """A tensor of a mapping, which may make it at each access, as one that is not kept."""
    if isinstance(tensors, LazyTensors):
        return tensors.lazy[name]
    return LazyTensor.of(tensors[name], None if isinstance(tensors, dict) else partial(tensors.__getitem__, name))


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedState(Plan):
    """A quantized model as data, from `snapshot` or a file; `fakequant.apply` puts it into a float model.

    A weight in `tensors` has these values; one that is in `weights` alone has those of its codes, and the quantizers
    that read it have their scales. Of a live model both hold it, and a file stores either.

    Attributes:
        tensors: parameters and buffers by their name in the state dict, without tied names.
        weights: the quantized weights as codes, by the name of the parameter. Of a live model they are made at each
            access and not kept: use one before you ask for the next, and ask before the model changes.
        layers: what is quantized in each layer, by path.
        sites: what is quantized in the functions that a `forward` calls.
        shared: tied names, each with the name of the same tensor in `tensors` or `weights`.
        versions: of modules (`_version`), by path, where they are not 1; None where it is not known.
        stale: the quantizers of weights, by path, whose scales were made for other weights.

    >>> state = snapshot(prepare(nn.Sequential(nn.Linear(4, 2)), "int4_weight_only"))
    >>> list(state.layers), list(state.tensors)
    (['0'], ['0.weight', '0.bias'])
    >>> weight = state.weights["0.weight"]
    >>> weight.codes.shape, weight.scale.shape, str(weight.spec.format)
    (torch.Size([2, 4]), torch.Size([2, 1]), 'int4')
    """

    tensors: Mapping[str, Tensor]
    weights: Mapping[str, WeightCodes] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"QuantizedState({len(self.weights)} weights as codes, {len(self.tensors)} tensors)"

    @property
    def plan(self) -> dict[str, Any]:
        """All but the tensors as values for JSON, which `from_plan` reads."""
        return plain_of(self.fields())

    @property
    def in_float(self) -> Mapping[str, str]:
        """The quantized weights of a live model that have no codes, each with the reason."""
        return self.weights.in_float if isinstance(self.weights, QuantizedWeights) else {}

    @property
    def others(self) -> list[str]:
        """The names in `tensors` beside those of `weights` and of the scales, zero points and codes of these."""
        own = set(self.weights)
        for name in self.weights:  # not `values()`: two weights would be alive at once
            own |= {f"{path}.{key}" for path in self.weights[name].quantizers for key in ("scale", "zero_point", KEY)}
        return [name for name in self.tensors if name not in own]

    @classmethod
    def from_plan(
        cls,
        plan: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        weights: Mapping[str, WeightCodes] | None = None,
        source: str = "the plan",
    ) -> QuantizedState:
        """The state with a plan that was read from a file.

        Args:
            plan: as `plan` gives it; a key may be left out.
            tensors: see the attribute.
            weights: see the attribute.
            source: names the file in messages.

        Raises:
            CheckpointError: a value of the plan that is not what is expected there.

        >>> layer = {"type": "Linear", "quantizers": {"_weight_quantizer": {"tensor": "int8 per_channel(0)"}}}
        >>> state = QuantizedState.from_plan({"layers": {"0": layer}}, {"0.weight": torch.eye(2)})
        >>> apply(nn.Sequential(nn.Linear(2, 2, bias=False)), state)(torch.ones(2))
        tensor([1., 1.], grad_fn=<...>)
        """
        return cls.of(read_plan(plan, Plan, source), tensors, weights)

    @classmethod
    def of(
        cls, plan: Plan, tensors: Mapping[str, Tensor], weights: Mapping[str, WeightCodes] | None = None
    ) -> QuantizedState:
        """The state with a plan."""
        return cls(**plan.fields(), tensors=tensors, weights=weights or {})


@unwraps
def snapshot(model: nn.Module) -> QuantizedState:
    """A prepared model as data: its plan, its tensors, and its weights as codes, none of which are copies.

    Codes are made when they are asked for, of weights that hooks of Accelerate keep elsewhere too, so that a model
    larger than memory can be written weight by weight. A tensor that is sharded over processes is gathered when it is
    asked for: all of these must ask, in one order.

    Raises:
        CheckpointError: the model is not prepared.
        ConfigError: batch normalisations are folded for training.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), "int8_weight_only")
    >>> again = apply(nn.Sequential(nn.Linear(4, 4)), snapshot(model))
    >>> torch.equal(again(torch.ones(4)), model(torch.ones(4)))
    True
    """
    check_model(model, "snapshot", "snapshot(model)", CheckpointError)
    warn_unregistered(model)
    warn_of_new_layers(model)
    refuse_unprepared(model, CheckpointError, ", or save a float model with torch.save")
    give_values(model)
    shared = shared_names(model)
    return QuantizedState(
        shared=shared,
        versions=versions_of(model),
        layers={name: layer_entry(one) for name, one in model.named_modules() if isinstance(one, QuantizedLayer)},
        sites=sites_entry(model),
        stale=warn_stale_scales(model),
        tensors=LiveTensors(model, shared, _outdated_codes(model)),
        weights=QuantizedWeights(model, shared),
    )


def _outdated_codes(model: nn.Module) -> set[str]:
    """The keys of fixed codes whose weight has other values by now; sharded weights are gathered, one by one."""
    fixed = {
        path: q for path, q in quantizers(model).items() if q.fixed_codes is not None and not q.fixed_codes.is_meta
    }
    weights = quantized_weights(model) if fixed else {}
    return {
        f"{path}.{KEY}"
        for path, quantizer in fixed.items()
        if path not in weights or not quantizer.holds(whole(weights[path].tensor))
    }


class LiveTensors(LazyTensors):
    """The state dict of a model without tied names; what is offloaded or sharded is fetched at each access.

    Args:
        shared: tied names.
        left_out: others that it lacks.
    """

    def __init__(self, model: nn.Module, shared: Mapping[str, str], left_out: Container[str] = ()) -> None:
        modules = dict(model.named_modules())
        elsewhere = {name: name.rpartition(".") for name in offloaded(model)}

        def fetching(name: str, tensor: Tensor | LazyTensor) -> Tensor | LazyTensor:
            if isinstance(tensor, LazyTensor):
                return tensor
            if type(tensor) is StoredWeight:
                make = tensor.values
            elif name in elsewhere:
                path, _, own = elsewhere[name]
                make = partial(fetched, modules[path], own, tensor)
            elif is_sharded(tensor):
                make = partial(whole, tensor)
            else:
                return tensor
            return LazyTensor.of(tensor, make)

        state = with_stored(model, model.state_dict()) | _stored_codes(model)
        left = (name for name in state if name not in shared and name not in left_out)
        super().__init__({name: fetching(name, state[name]) for name in left})


def _stored_codes(model: nn.Module) -> dict[str, LazyTensor]:
    """The fixed codes that quantizers would have if no weight was stored as codes."""

    def codes(weight: Any) -> LazyTensor:
        kind = integers_of(weight.spec.format)
        return LazyTensor(tuple(weight.shape), kind, lambda: as_integers(weight.codes()))

    weights = quantized_weights(model).items()
    return {f"{path}.{KEY}": codes(w.tensor) for path, w in weights if type(w.parameter) is StoredWeight}


def versions_of(model: nn.Module) -> dict[str, int]:
    """The versions of the state of modules by path, where they are not torch's default of 1."""
    found = {name: module._version for name, module in model.named_modules(remove_duplicate=False)}
    return {name: version for name, version in found.items() if isinstance(version, int) and version != 1}


def shared_names(model: nn.Module) -> dict[str, str]:
    """Names of tied tensors, each with the first name of the same tensor."""
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in with_stored(model, model.state_dict()).items():
        # By the parameter where its memory may be elsewhere, or shared out.
        if is_sharded(tensor) or tensor.is_meta or type(tensor) is StoredWeight:
            key: tuple[Any, ...] = (id(parameters.get(name, tensor)),)
        else:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            shared[name] = first[key]
        first.setdefault(key, name)
    return shared
