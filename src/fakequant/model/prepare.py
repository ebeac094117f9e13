"""Turn a float model into a prepared model: every layer that a rule quantizes becomes a quantized layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fakequant.data.batches import Inputs, example_arguments
from fakequant.distributed import is_sharded, refuse_sharded
from fakequant.errors import ConfigError, CoverageWarning, ShapeError, shown, warn_user
from fakequant.model.config import NAMED, Config, Rule, TensorConfig
from fakequant.model.engine import Engine, find_engine
from fakequant.model.placement import Placement, Target, own_forwards, place, with_own_products
from fakequant.model.presets import find_preset
from fakequant.model.run.outputs import record
from fakequant.model.sites import apply_sites, plan_sites, with_training
from fakequant.model.summary import (
    gradients_in_float,
    left_in_float,
    note_floats,
    operations_of,
    quantized_parameters,
    scripted,
    warn_unregistered,
)
from fakequant.model.weights import exceeds_float, in_eval_mode, note_on_scales, share_after_loading, untied
from fakequant.nn.functions import SITE_FUNCTIONS
from fakequant.nn.integer import Execution
from fakequant.nn.paths import join, layer_of
from fakequant.nn.products import Product
from fakequant.nn.quantized.forms import become, bypasses_class, quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer, is_linear, leave_fast_paths
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.nn.sharded import share_mesh
from fakequant.nn.sites import SITES
from fakequant.nn.wrappers import Operand, Role, accepts_wrapped_model
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.restore import restore_after, structure_of
from fakequant.text import listed, module_name

Model = TypeVar("Model", bound=nn.Module)
Run = Callable[[], object]


@accepts_wrapped_model
def prepare(
    model: Model,
    config: Config | str,
    example: Any = None,
    *,
    inputs: Inputs | None = None,
    target: str | Engine | Target | None = None,
    skip: Sequence[str] = (),
    rules: Mapping[str, Config | str] | None = None,
) -> Model:
    """Turn the layers of a model into quantized layers, in place.

    Layers change their class to a subclass (`nn.Linear` to `QuantLinear`): parameters, hooks, `state_dict` keys and
    `isinstance` stay. Layers of the classes in `fakequant.nn.layers()` are quantized, and layers of subclasses with the
    same computation. Other subclasses may compute anything: with an example, the function that multiplies by their
    weight gets the quantizers; else they stay in float until `fakequant.nn.quantizes` names their quantized form.

    If weights stay in float for lack of a quantized form, a `CoverageWarning` names and counts them, in one line. It
    does not name a layer that a rule leaves in float.

    Args:
        model: any module; it is changed and returned.
        config: a preset such as `presets.INT8`, its name, or your own rules. If the engine does not need fixed ranges,
            "int8_per_token" loses less than "int8" in transformers, see docs/methods.md.
        example: an input, a tuple or a dict of inputs. With an example the model runs where this is needed, and if
            the configuration quantizes inputs, the warning also names the products that stay in float, with their share
            of all multiply-accumulates.
        inputs: which part of the example the model gets, as for `calibrate`.
        target: the engine that will run the model, by its name in `fakequant.known_engines()`, or a `fakequant.Engine`.
            If the engine computes something else than the configuration, so does the prepared model, with a warning.
            "onnxruntime", "tensorrt", "openvino", "qnn" and "xnnpack" need an example: these engines decide which
            layers, and which functions in the model's own `forward`, get quantizers. A `fakequant.Target` decides only
            this. Without a target, layers get quantizers, and functions that rules name; with an example, also the
            product in an overridden `forward` of a layer.
        skip: patterns of layers that stay in float, as ["head"] or ["*.norm"], and of calls of functions by the names
            in `summary`, as ["block._sites.add_0"].
        rules: for patterns of layers, other presets, as {"body.*": "int4"}; these override `skip`.

    Raises:
        ConfigError: a rule matches nothing; the model is already prepared; a layer, which is named, cannot be quantized
            by its rule; the target cannot load the model (the nearest preset is named); or the model fails on the
            example (the layer and the shapes are named).

    The model is unchanged after any error or interrupt.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "int8", skip=["2"])
    >>> model[0]
    QuantLinear(
      in_features=4, out_features=4, bias=True
      (_input_quantizer): Quantizer(int8 per_tensor, input, not calibrated)
      (_weight_quantizer): Quantizer(int8 per_channel(0), weight, follows the weight)
    )
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"prepare takes a model first, got {shown(model)}; write prepare(model, 'int8')")
    if found := quantizers(model):
        raise ConfigError(
            f"the model is already prepared: it has {len(found)} quantizers, the first is {next(iter(found))}; "
            "prepare a new float model"
        )
    refuse_exported(model)
    by_name = isinstance(config, str) and not rules
    preset: Config = config if isinstance(config, Config) else find_preset(config)
    config = with_exceptions(preset, skip, rules or {}).for_model(model)
    engine = None if target is None or isinstance(target, Target) else find_engine(target)
    table, variant, unsuited = target if isinstance(target, Target) else None, "", ""
    if engine is not None:
        named = [preset, *(one if isinstance(one, Config) else find_preset(one) for one in (rules or {}).values())]
        unsuited = engine.unknown_gain(dict.fromkeys(one.name for one in named if one.name in NAMED))
        (config, variant), table = engine.computed(config, model), engine.placement_of(config)
    restore = structure_of([model])
    try:
        purposely = config.left_on_purpose(model)
        for path, module in model.named_modules():
            if module not in purposely and (held := _foreign_codes(module)) is not None:
                raise ConfigError(
                    f"{module_name(path)} is quantized already, by another library: its {held}. Prepare the float "
                    f"model, or leave the layer unchanged with skip=[{path!r}]"
                )
        own = {} if example is None or table is not None else own_forwards(config, model)
        run = _run_of(model, config, table, example, inputs, needed=bool(own))
        held, sites, notes = config.resolve(model, any_module=bool(table or config.site_rules or own)), None, []
        if run is not None and (config.site_rules or table is not None or own):
            meant = all(rule.leaves_in_float and not rule.optional for rule in config.site_rules)
            if table is None and not own and meant:
                raise ConfigError(
                    f"{config.site_rules[0]} quantizes nothing: it leaves functions in float, as they are without a "
                    "rule; to quantize them, give the rule a preset or input=, as Rule('*', 'int8', ops='matmul')"
                )
            recording = record(model, run)
            config = with_own_products(config, own, model, recording)
            placed = Placement({}, held) if table is None else place(model, config, recording, table, held)
            sites, note = with_training(model, plan_sites(model, config, recording, placed.sites), recording, run)
            notes, unsuited = [*placed.notes, *note], placed.unsuited or unsuited
            # A layer that is never called stays in float where a function reads its parameters: the function has the
            # quantizers. Quantized layers may read them, too: in Marian two embeddings share the table `shared`.
            functions = (call for call in recording.calls if call.owner not in placed.layers)
            read = {value for call in functions for value in call.inputs}
            parameters = {parameter for value, parameter in enumerate(model.parameters()) if value in read}
            held = {
                path: rule
                for path, rule in placed.layers.items()
                if recording.visits[path] or parameters.isdisjoint(model.get_submodule(path).parameters(recurse=False))
            }
        modules = dict(model.named_modules())
        for name, rule in held.items():
            _check_layer(modules[name], rule, name)
        small = [name for name, rule in held.items() if _too_small(_quantized(modules[name]), modules[name], rule)]
        for name, rule in held.items():
            quantize_layer(modules[name], rule, name)
        if sites is not None:
            apply_sites(model, sites)
        leave_fast_paths(model)
        share_mesh(model)
        share_after_loading(model)
        with Peaks(model if table is None else nn.Module()).watching() as peaks:  # an engine asks for fixed ranges
            recording = None if run is None else record(model, run)
        missed = [] if recording is None else [name for name in held if not recording.visits[name]]
        for quantizer in (own for name in missed for own in modules[name].children()):
            vars(quantizer)["is_unreached"] = True  # `calibrate` leaves the layer in float if no batch comes either
        counted = () if recording is None or not _quantizes_inputs(config) else operations_of(recording)
        computed = () if recording is None else quantized_parameters(model, recording)
        left = left_in_float(model, purposely, counted, computed)
        hidden = None if recording is None else scripted(model, purposely)
        wanted = any(rule.gradient is not None for rule in config.rules)
        gradients = gradients_in_float(model) if wanted else None
        notes += [str(note) for note in (left, hidden, gradients, untied(model, purposely)) if note is not None]
        if engine is not None:
            engine.mark(model)
            engine.refuse(model, preset.name)
        notes += [note for note in (variant, unsuited) if note]
        for note in (*notes, *peaks.notes, *note_on_scales(model, small, by_name=by_name)):
            warn_user(note, CoverageWarning)
        warn_unregistered(model)
        note_floats(model)
        return model
    except BaseException:
        restore()
        raise


def refuse_exported(model: nn.Module) -> None:
    """Refuse modules that torch.export made: they call operators of ATen instead of layers."""
    unflatten = sys.modules.get("torch.export.unflatten")
    interpreted = () if unflatten is None else (unflatten.InterpreterModule, unflatten.UnflattenedModule)
    for path, module in model.named_modules():
        # torch.export forbids `train` there. What `unflatten` makes runs in a larger model, and stays in float.
        is_graph = isinstance(module, torch.fx.GraphModule) and "train" in vars(module)
        if is_graph or (module is model and isinstance(module, interpreted)):
            raise ConfigError(
                f"{module_name(path)} was made by torch.export, which replaces layers and functions by operators of "
                "ATen that cannot get quantizers; prepare the model itself, and export it afterwards"
            )


def _foreign_codes(module: nn.Module) -> str | None:
    tensors = {n: t for n, t in chain(module._parameters.items(), module._buffers.items()) if t is not None}
    for name, tensor in tensors.items():
        if is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor):
            return f"{name} is a {type(tensor).__module__.partition('.')[0]}.{type(tensor).__name__}"
        if tensor.dtype not in (torch.int8, torch.uint8, torch.int32) or "weight" not in name:  # int64 are indices
            continue
        scaled = any("scale" in other for other in tensors) and sum(size > 1 for size in tensor.shape) > 1
        if scaled or isinstance(tensor, nn.Parameter):
            return f"{name} holds {str(tensor.dtype).removeprefix('torch.')} codes"
    return None


def with_exceptions(config: Config, skip: Sequence[str], rules: Mapping[str, Config | str]) -> Config:
    """A configuration with added rules: what `skip` names stays in float, and layers in `rules` get other presets.

    Raises:
        ConfigError: `skip` or `rules` has a wrong type, or a preset is unknown.
    """
    if isinstance(skip, str):
        raise ConfigError(f"skip takes a list of patterns, got {skip!r}; write skip=[{skip!r}]")
    if not isinstance(rules, Mapping):
        raise ConfigError(
            f"rules takes a dict from patterns to presets, got {rules!r:.80}; write rules={{'head': 'int4'}}"
        )
    added = [Rule(pattern, ops=_functions_in(pattern)) for pattern in skip]
    for pattern, of in rules.items():
        added.append(Rule(pattern, of))
        kinds = (of if isinstance(of, Config) else find_preset(of)).layer_rules
        added += [
            replace(rule, pattern=pattern, optional=True) for rule in kinds if rule.layers and rule.pattern == "*"
        ]
    return config.with_rule(*added) if added else config


def _functions_in(pattern: str) -> tuple[str, ...]:
    """The functions whose calls a pattern such as "block._sites.add_0" names; empty for a pattern of layers."""
    if not isinstance(pattern, str) or SITES not in pattern.split("."):
        return ()
    call = pattern.rpartition(".")[2]
    return tuple(SITE_FUNCTIONS) if {*"*?["} & {*call} else (call.rpartition("_")[0],)


_LAZY = "its parameters have no shapes before the first call; call the model once before prepare"


def _run_of(
    model: nn.Module, config: Config, target: Target | None, example: Any, inputs: Inputs | None, *, needed: bool
) -> Run | None:
    """A function that runs a model on the example; None if no run is needed. With `needed`, a run is always needed.

    Raises:
        ConfigError: a run is needed, but there is no example or the model cannot run yet.
    """
    places = bool(config.site_rules) or target is not None
    if example is None and places:
        ops = listed([*dict.fromkeys(op for rule in config.site_rules for op in rule.ops)])
        why = f"rules name functions ({ops})" if target is None else f"the target {target.name} places quantizers"
        raise ConfigError(
            f"{why}, so that a run of the model must show which functions it calls; pass prepare an example=: an "
            "input, a tuple or a dict of inputs"
        )
    if example is None or not (needed or places or _quantizes_inputs(config)):
        return None
    refuse_sharded(model, "look into", offloading=False)
    lazy = [path for path, module in model.named_modules() if isinstance(module, LazyModuleMixin)]
    if lazy:
        raise ConfigError(f"{module_name(lazy[0])}: {_LAZY}")
    arguments = example_arguments(example, inputs)
    return lambda: arguments.run(model)


def _quantizes_inputs(config: Config) -> bool:
    return any(rule.input is not None for rule in config.rules)


def quantize_layer(layer: nn.Module, rule: Rule, name: str) -> None:
    """Turn a float layer into its quantized form, as a rule says; a rule without formats changes nothing."""
    attach(layer, configs_of(_quantized(layer), layer, rule), name)
    if isinstance(layer, QuantizedLayer):
        layer.execution, layer.gradient = rule.execution, rule.gradient


def _quantized(layer: nn.Module) -> type[QuantizedLayer]:
    quantized = quantized_class(layer)
    assert quantized is not None, f"{type(layer)} has no quantized form, and was to be checked for one"
    return quantized


def configs_of(quantized: type[QuantizedLayer], layer: nn.Module, rule: Rule) -> dict[str, TensorConfig]:
    """For each quantizer that a rule gives a layer: its attribute in the layer, and its configuration."""
    configs = {attribute: _placed(rule, operand) for attribute, operand in quantized.operands(layer).items()}
    left = _too_small(quantized, layer, rule)
    return {name: config for name, config in configs.items() if config is not None and name not in left}


def _too_small(quantized: type[QuantizedLayer], layer: nn.Module, rule: Rule) -> list[str]:
    """The weights' quantizers that a weight-only rule omits, because codes and scales would be larger than floats."""
    if rule.input is not None:
        return []
    found = []
    for attribute, operand in quantized.factors(layer).items():
        parameter = Product.of(layer, attribute, operand.weight).parameter if operand.weight else None
        config = _placed(rule, operand)
        if config is None or parameter is None or isinstance(parameter, UninitializedParameter):
            continue
        if exceeds_float(config.spec, tuple(parameter.shape), 8 * parameter.element_size()):
            found.append(attribute)
    return found


def _placed(rule: Rule, operand: Operand) -> TensorConfig | None:
    config = rule.tensor(operand.role, operand.axes(), operand.kernel)
    return config.for_each() if operand.is_stack and config is not None else config


def _check_layer(layer: nn.Module, rule: Rule, name: str) -> None:
    quantized = _quantized(layer)
    try:
        configs = configs_of(quantized, layer, rule)
        if not configs:
            return
        if isinstance(layer, LazyModuleMixin):
            raise ConfigError(_LAZY)
        if bypasses_class(layer):
            raise ConfigError(
                "its forward was replaced, for example by a hook, so that calls would bypass the quantizers; remove "
                "the hook, or leave the layer in float by a rule"
            )
        quantized.check(layer)
        for attribute, operand in quantized.operands(layer).items():
            if operand.role is Role.WEIGHT and attribute in configs:
                weight = Product.of(layer, attribute, operand.weight)
                with in_eval_mode(weight.layer):  # a spectral norm makes a step whenever its weight is read in training
                    if not isinstance(value := getattr(weight.owner, weight.name, None), Tensor):
                        raise ConfigError("its weight is computed in the first call; run the model once first")
                    configs[attribute].spec.granularity.group_shape(value.shape)
        if rule.execution is Execution.INTEGER:
            if quantized.product is None:
                reason: str | None = f"there is no integer product for {quantized.float_class.__name__}"
            else:
                specs = (configs[n].spec if n in configs else None for n in quantized.product.quantizers)
                reason = quantized.product.cannot(layer, *specs)
            if reason is not None:
                raise ConfigError(
                    f'execution="integer" is not possible: {reason}; use "auto", which simulates such layers'
                )
    except (ConfigError, ShapeError) as error:
        raise ConfigError(f"{module_name(name)}: {error}") from error


def attach(layer: nn.Module, configs: dict[str, TensorConfig], name: str) -> None:
    """Change a float layer's class to its quantized form, with a quantizer for each attribute in `configs`."""
    if not configs:
        return
    quantized = _quantized(layer)
    become(layer, quantized, quantizers_of(quantized, layer, configs, name))


def quantizers_of(
    quantized: type[QuantizedLayer], layer: nn.Module, configs: dict[str, TensorConfig], name: str
) -> dict[str, Quantizer | None]:
    """For the attribute of each operand of a layer: a new quantizer, or None if the operand stays in float."""
    operands = quantized.operands(layer)
    made: dict[str, Quantizer | None] = dict.fromkeys(operands)
    for attribute, config in configs.items():
        kind = Kind.WEIGHT if operands[attribute].role is Role.WEIGHT else Kind.INPUT
        quantizer = Quantizer(config.spec, kind=kind, dynamic=config.dynamic)
        quantizer.name = join(name, attribute)
        quantizer.train(layer.training)
        made[attribute] = quantizer
    return made


PEAK = 44.0
"""The ratio of an input's largest magnitude to its root mean square above which 8 bits give less than 20 dB, because a
step is the largest magnitude / 127. MiniLM-L6 has 89, and its output has 15 dB by `int8`, 23 dB by `int8_per_token`; a
ViT, a byte transformer, Fracast-0, CREPE and a perceptron have at most 24, and their outputs 34 dB and more."""
_FEWER = 2.0
"""The largest value over the root mean square of all tokens' largest values, above which scales per token gain 6 dB."""


class Peaks:
    """Finds linear layers whose inputs have outliers: a few far larger values, under one fixed scale of 8 bits.

    >>> model = prepare(nn.Sequential(nn.Linear(2, 2)), "int8")
    >>> x = torch.ones(10_000, 2)
    >>> x[0, 0] = 1000.0
    >>> with Peaks(model).watching() as peaks, disabled(model):
    ...     y = model(x)
    >>> print(*peaks.notes)
    1 input of a linear layer has single values far larger than the others, up to 140 times the root mean square in 0: \
one fixed scale of 8 bits loses much there, and "int8_per_token" loses less where the engine takes it
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = dict[str, float]()
        self._watched = {
            name: one
            for name, one in quantizers(model).items()
            if one.kind is Kind.INPUT
            and not one.dynamic
            and isinstance(one.spec.granularity, PerTensor)
            and one.spec.format.bits == 8
            and isinstance(one.spec.format, IntegerFormat)
            and is_linear(model.get_submodule(layer_of(name)))
        }

    @contextmanager
    def watching(self) -> Iterator[Peaks]:
        """A context in which the inputs of linear layers are searched for outliers."""
        handles: list[Any] = []

        def remove() -> None:
            for handle in handles:
                handle.remove()

        with restore_after(remove):
            for name, one in self._watched.items():
                handles.append(one.register_forward_pre_hook(partial(self._see, name)))
            yield self

    def _see(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():  # what records the run does not see it
            x = args[0]
            if x.dim() < 2 or not x.numel() or x.is_meta:
                return
            tokens = x.detach().abs().amax(-1).double()
            largest, mean = float(tokens.max()), float(x.detach().double().square().mean()) ** 0.5
            if largest > max(PEAK * mean, _FEWER * float(tokens.square().mean()) ** 0.5):
                self._found[name] = max(self._found.get(name, 0.0), largest / mean)

    @property
    def notes(self) -> list[str]:
        """A list with a line on the inputs with outliers; empty if no input has outliers."""
        if not self._found:
            return []
        worst = max(self._found, key=self._found.__getitem__)
        many = len(self._found)
        return [
            f"{many} input{'s of linear layers have' if many > 1 else ' of a linear layer has'} single values far "
            f"larger than the others, up to {self._found[worst]:.0f} times the root mean square in {layer_of(worst)}: "
            'one fixed scale of 8 bits loses much there, and "int8_per_token" loses less where the engine takes it'
        ]
