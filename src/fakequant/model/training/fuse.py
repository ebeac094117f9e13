"""Fold batch normalisations into the layers before them, as engines do when they load a model."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from fakequant.data.arguments import refuse_prepared
from fakequant.data.batches import Arguments, Inputs, example_arguments
from fakequant.distributed import refuse_sharded
from fakequant.errors import ConfigError, FusionWarning, warn_user
from fakequant.model.placement import ends_in_product
from fakequant.model.run.outputs import Distance, Place, named_tensors, record
from fakequant.model.run.recorded import Neighbors, find_neighbors
from fakequant.model.weights import disabled, evaluating, in_eval_mode
from fakequant.nn.quantized.folded import (
    FOLDABLE,
    NORMS,
    FusedBatchNorm,
    is_batch_norm,
    norm_axes,
    norm_factor,
    norm_offset,
    scaled_weight,
)
from fakequant.nn.quantized.forms import computed_class, output_channels
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import has_no_hooks
from fakequant.nn.sites import Sites, sites_of
from fakequant.restore import in_order, restore_after, restore_on_error, state_of, structure_of
from fakequant.text import listed, module_name, table

Model = TypeVar("Model", bound=nn.Module)

_NAMED = 6


@dataclass(frozen=True)
class Fusions:
    """The batch normalisations of a model: some can be fused into a layer, the others stay.

    Attributes:
        fused: for the path of each normalisation that can be fused, the path of the layer that takes it.
        left: for the path of each other normalisation, the reason why it stays.
    """

    fused: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{norm or '(model)'} into {layer or '(model)'}" for norm, layer in self.fused.items()]
        lines += [f"{norm or '(model)'} stays: {why}" for norm, why in self.left.items()]
        return table([[line] for line in lines])

    def __repr__(self) -> str:
        return str(self) or "no batch normalisations"


def fuse_batch_norm(model: Model, example: Any = None, *, inputs: Inputs | None = None) -> Model:
    """Fold every batch normalisation that directly follows a convolution or linear layer into that layer, in place.

    The output stays the same up to rounding. A `FusedBatchNorm`, which returns its input, takes the place of the
    normalisation. A run with the example shows which normalisation follows which layer; without an example,
    `torch.fx.symbolic_trace` does. A `FusionWarning` names the normalisations that stay, with the reasons.
    `find_fusions` lists beforehand what will be fused. A second call finds nothing to do. A subclass of such a layer
    with another `forward` is included if the run with the example shows that this `forward` ends in a single product
    with the layer's weight.

    Args:
        model: a float model whose batch normalisations are in eval mode; call this before `prepare`.
        example: an input, a tuple or a dict of inputs; with an example the outputs before and after are compared.
        inputs: which part of the example the model gets, as for `calibrate`.

    Raises:
        ConfigError: a normalisation is in training mode; the model is prepared, sharded, or without an example cannot
            be traced; or outputs differ by more than rounding. Nothing is then changed.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> x = torch.randn(2, 3, 8, 8)
    >>> before = model(x)
    >>> torch.allclose(fuse_batch_norm(model, x)(x), before, atol=1e-5)
    True
    >>> model
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): FusedBatchNorm(into 0, inputs of 4 axes)
      (2): ReLU()
    )
    """
    found = find_fusions(model, example, inputs=inputs)
    modules = dict(model.named_modules())
    layers = [modules[layer] for layer in found.fused.values()]
    arguments = None if example is None else example_arguments(example, inputs)

    def run() -> dict[Place, Tensor]:
        with evaluating(model), torch.no_grad():
            assert arguments is not None
            return named_tensors(arguments.run(model))

    before = {} if arguments is None else {name: tensor.clone() for name, tensor in run().items()}
    with restore_on_error(in_order(structure_of([model]), state_of(layers))):
        fuse_found(model, found)
        if arguments is not None:
            distance = Distance()
            distance.add(before, run())
            for index, (place, share) in enumerate(distance.shares.items()):
                allowed = torch.finfo(before[place].dtype).eps if place in before else 0.0
                if not share <= allowed:
                    raise ConfigError(
                        f"output {index} of the model changed by {share**0.5:.3g} of its size when batch "
                        f"normalisations were fused, but rounding explains {allowed**0.5:.3g}; nothing was changed. "
                        "Two calls of the model may compute different functions"
                    )
    if found.left:
        warn_user(left_text(found, "fused"), FusionWarning)
    return model


@torch.no_grad()
def fuse_found(model: nn.Module, found: Fusions) -> None:
    """Fold the batch normalisations that `fusions_of` found, in place."""
    modules = dict(model.named_modules())
    fused: dict[nn.Module, nn.Module] = {}
    for norm, layer in found.fused.items():
        taker, factor = modules[layer], norm_factor(modules[norm])  # computed in float64 and rounded once
        weight, bias = taker._parameters["weight"], taker._parameters.get("bias")
        assert weight is not None
        offset = norm_offset(modules[norm], bias, factor)
        weight.copy_(scaled_weight(taker, weight, factor))
        if bias is None:
            taker.bias = nn.Parameter(offset.to(weight.dtype), requires_grad=weight.requires_grad)
        else:
            bias.copy_(offset)
        fused[modules[norm]] = FusedBatchNorm.of(modules[norm], layer, norm_axes(modules[layer]))
    replace_modules(model, fused)


def find_fusions(model: nn.Module, example: Any = None, *, inputs: Inputs | None = None) -> Fusions:
    """List which batch normalisations `fuse_batch_norm` fuses into which layer, and why the others stay.

    Args:
        model: the model, which is not changed; arguments and errors are as for `fuse_batch_norm`.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4)).eval()
    >>> print(find_fusions(model))
    1 into 0
    3 stays: its input is not the output of a convolution or linear layer
    """
    refuse_prepared(model, "fuse_batch_norm")
    refuse_sharded(model, "fuse the batch normalisations of")
    return fusions_of(model, None if example is None else example_arguments(example, inputs))


def fusions_of(model: nn.Module, arguments: Arguments | None) -> Fusions:
    """The fusions that `find_fusions` returns, for a float or a prepared model.

    Args:
        arguments: the arguments of a run; None to trace the model by torch.fx.
    """
    norms = {name: m for name, m in model.named_modules() if is_norm(m)}
    if training := [module_name(name) for name, norm in norms.items() if is_batch_norm(norm) and norm.training]:
        raise ConfigError(
            f"{len(training)} batch normalisations are in training mode, the first is {training[0]}; "
            "call model.eval() before fuse_batch_norm"
        )
    if not norms:
        return Fusions({}, {})
    layers = dict[nn.Module, str]()
    for name, m in model.named_modules():
        cls = computed_class(m)
        if any(one in FOLDABLE for one in (cls.__mro__ if issubclass(cls, QuantizedLayer) else (cls,))):
            layers[m] = name
    others = {
        m: name for name, m in model.named_modules() if m not in layers and m._parameters.get("weight") is not None
    }
    own = {m: name for m, name in others.items() if isinstance(m, FOLDABLE)}
    if arguments is not None and own:
        products = ends_in_product(model, own, arguments)
        layers |= {layer: name for layer, name in own.items() if layer in products}
    flow = _flow(model, layers.keys(), {*norms.values()}, arguments)
    sources = {reader: layer for layer, readers in flow.readers.items() for reader in readers}
    users = Counter(
        parameter.data_ptr()
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None and not isinstance(parameter, UninitializedParameter)
    )
    fused: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, norm in norms.items():
        layer = sources.get(norm)
        why = _why_norm_stays(norm, flow.calls[norm], 4 if layer is None else norm_axes(layer))
        if why is None and layer is not None:
            why = _why_layer_stays(layer, norm, flow, users)
        elif why is None:
            why = "its input is not the output of a convolution or linear layer"
        if layer is None or why is not None:
            left[name] = str(why)
        else:
            fused[name] = layers[layer]
    return Fusions(fused, left)


def _flow(model: nn.Module, layers: Set[nn.Module], norms: Set[nn.Module], arguments: Arguments | None) -> Neighbors:
    """The normalisations that read the output of each layer: by a run, or without arguments by torch.fx."""
    if arguments is not None and not any(map(is_lazy, chain(model.parameters(), model.buffers()))):
        recording = record(model, lambda: arguments.run(model))
        return find_neighbors(model, recording, layers, norms, through=frozenset())
    try:
        with restore_after(structure_of([model])), in_eval_mode(model):  # a model may store what it sees: proxies
            parameters = inspect.signature(model.forward).parameters.values()
            # torch.fx would take optional arguments for given ones.
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.kind != p.KEYWORD_ONLY}
            graph = _Tracer(layers | norms).trace(model, concrete_args=defaults)
    except Exception as error:  # tracing runs the model's own code, with values for which it was not written
        raise ConfigError(
            f"torch.fx cannot trace the model ({type(error).__name__}: {error}); give an example, so that a run of the "
            "model shows the order of its layers"
        ) from error
    found = Neighbors()
    called = {node: model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    found.calls.update(called.values())
    for node, module in called.items():
        if module in norms and len(node.all_input_nodes) == 1:
            source = called.get(node.all_input_nodes[0])
            if source is not None and source in layers:
                found.readers.setdefault(source, []).append(module)
        if module in layers and any(called.get(user) not in norms for user in node.users):
            found.elsewhere.add(module)
    read = {model.get_submodule(str(node.target).rpartition(".")[0]) for node in graph.nodes if node.op == "get_attr"}
    found.elsewhere |= read & layers
    return found


class _Tracer(fx.Tracer):
    """A tracer that records a call of a layer or a normalisation as one call, whatever its class."""

    def __init__(self, whole: Set[nn.Module]) -> None:
        super().__init__()
        self.whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.whole or super().is_leaf_module(m, module_qualified_name)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a batch normalisation, or has the same tensors, like torchvision's `FrozenBatchNorm2d`."""
    if is_batch_norm(module):
        return True
    held = [getattr(module, name, None) for name in ("running_mean", "running_var", "weight", "bias")]
    return hasattr(module, "eps") and all(isinstance(x, Tensor) and x.shape == held[1].shape for x in held)  # type: ignore[union-attr]


@torch.no_grad()
def why_other(norm: nn.Module, axes: int) -> str | None:
    """Why a module is perhaps not a batch normalisation followed by its submodules; None if it surely is.

    Classes of other libraries are tried with numbers, on a copy: timm's `BatchNormAct2d` has an activation, and
    torchvision's `FrozenBatchNorm2d` is not a batch normalisation of torch.
    """
    if type(norm) in NORMS or getattr(norm, "running_mean", None) is None:
        return None
    said = f"a {type(norm).__name__} may compute something else than a batch normalisation"
    if any(map(is_lazy, chain(norm.parameters(), norm.buffers()))):
        return said
    if len(inspect.signature(norm.forward).parameters) != 1:
        return f"a {type(norm).__name__} takes more than one input"
    with torch.random.fork_rng(devices=()):
        own: Any = copy.deepcopy(norm).eval()
        for length in (1, 3, 8):
            try:
                shape = (3, len(own.running_mean), *[length] * (axes - 2))
                spread = torch.linspace(-1, 1, prod(shape), dtype=torch.float64, device="cpu") ** 5 * 1e4
                x = spread.to(own.running_mean).reshape(shape)
                y = F.batch_norm(x, own.running_mean, own.running_var, own.weight, own.bias, eps=own.eps)
                with disabled(own):  # quantizers have no ranges yet
                    found = own(x.clone())
                    for module in own.children():
                        y = y if isinstance(module, Sites) else module(y)
            except Exception:  # the module's own code, which was not written for these numbers, raises any
                return said
            same = isinstance(found, Tensor) and found.shape == y.shape
            if not same or not torch.allclose(found, y, rtol=1e-4, atol=1e-5):
                return said
    return None


def _why_norm_stays(norm: nn.Module, calls: int, axes: int) -> str | None:
    """The reason why a batch normalisation cannot be fused into any layer; None if it can."""
    if sites_of(norm) is not None:
        return "functions that it calls have quantizers"
    if why := why_other(norm, axes):
        return why
    if cast("nn.BatchNorm2d", norm).running_mean is None:
        return "it has no running statistics, so that each batch is normalised by its own"
    if not has_no_hooks(norm):
        return "it has hooks or a forward of its own"
    return None if calls == 1 else "it is never called" if not calls else f"it is called {calls} times"


def _why_layer_stays(layer: nn.Module, norm: nn.Module, flow: Neighbors, users: Counter[int]) -> str | None:
    """The reason why a batch normalisation cannot be fused into the layer before it; None if it can."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if flow.calls[layer] != 1:
        return f"the layer before it is called {flow.calls[layer]} times"
    if weight is None or layer.weight is not weight:
        return "the weight of the layer before it is computed (weight_norm, pruning, a parametrization)"
    if layer in flow.elsewhere or len(flow.readers[layer]) > 1:
        return "the output or a parameter of the layer before it is used elsewhere, too"
    if not has_no_hooks(layer):
        return "the layer before it has hooks or a forward of its own"
    if isinstance(weight, UninitializedParameter):
        return "the layer before it gets its shapes in the first call; run the model once first"
    if any(users[parameter.data_ptr()] > 1 for parameter in (weight, bias) if parameter is not None):
        return "the layer before it shares a parameter with another module"
    channels = len(cast("Tensor", norm.running_mean))
    if output_channels(layer) != channels:
        return f"it has {channels} channels, and the layer before it {output_channels(layer)}"
    return None


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace each module that is a key of `new` by the value for this key, under all names of the module."""
    for old, module in new.items():
        module.train(old.training)
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            if child is not None and child in new:
                parent._modules[name] = new[child]


def left_text(found: Fusions, done: str) -> str:
    """A line with the number of folded batch normalisations, and the names of the others with reasons.

    Args:
        done: the word for "folded" in the line, such as "fused".
    """
    reasons: dict[str, list[str]] = {}
    for name, why in found.left.items():
        reasons.setdefault(why, []).append(module_name(name))
    parts = [f"{listed(names, _NAMED)} ({why})" for why, names in reasons.items()]
    count = len(found.left)
    stay = "1 batch normalisation stays" if count == 1 else f"{count} batch normalisations stay"
    return f"{len(found.fused)} {done}, {stay}: {'; '.join(parts)}"
