"""The quantizer: one module that is off, observes, or quantizes.

Quantized weights that are given out again while nothing changes them.

Quantizers in models with adapters of peft: their ranges train and are saved with the adapter.

peft freezes all parameters but the adapter's, and saves nothing else. It exempts modules of one class of its own,
`AuxiliaryTrainingWrapper`, which say themselves what they save. A quantizer becomes one where peft is imported, so that
`save_pretrained`, the Trainer's checkpoints, `from_pretrained` and `load_adapter` need no call of the user.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _all_modules
from torch.utils.hooks import RemovableHandle

from fakequant.calibration import Calibrator
from fakequant.distributed import whole
from fakequant.errors import CalibrationError, CallError, ConfigError, ShapeError, StaleScaleWarning, warn_user
from fakequant.nn.ranges.by_value import ByValue, Kind, Mode, RangesByValue
from fakequant.nn.ranges.fixed_codes import KEY, UNUSUAL, KeptCodes, look
from fakequant.nn.ranges.learned import GlobalScale, LearnedRange, learned_ranges, make_learned_range, shared_by
from fakequant.nn.ranges.sharded import Mesh, known_part
from fakequant.numerics.qparams import PLAIN, QParams, Range, is_concrete, lend, shape_of
from fakequant.numerics.qparams import choose_qparams as qparams_of_range
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding, as_spec
from fakequant.ops import library
from fakequant.restore import restore_on_error, state_of

_Made = TypeVar("_Made")


class _Cached(Protocol):
    """What a cache needs to know of a `Quantizer`."""

    name: str
    spec: QuantSpec
    dynamic: bool
    scale: Tensor | None
    zero_point: Tensor | None
    fixed_codes: Tensor | None

    @property
    def learned(self) -> object | None: ...

    def quantized(self, x: Tensor) -> Tensor: ...

    def encoded(self, x: Tensor) -> tuple[Tensor, QParams] | None: ...


class WeightCache:
    """The values and the codes of the weight of one quantizer, each found at its first use.

    Copies and pickles of it are None: the copy of a quantizer quantizes its weight at every call.
    """

    def __init__(self, quantizer: _Cached) -> None:
        self._quantizer = quantizer
        self._state: tuple[Any, ...] | None = None
        self._held: list[Tensor] = []
        self._made: dict[str, Any] = {}

    def serves(self, x: Tensor) -> bool:
        """Whether x is a weight whose quantized values stay the same, and no gradient of it is wanted."""
        if torch.compiler.is_compiling() or not isinstance(x, nn.Parameter) or x.is_inference():
            return False
        if torch.is_grad_enabled() and x.requires_grad:
            return False
        quantizer = self._quantizer
        drawn = quantizer.spec.rounding is Rounding.STOCHASTIC
        return not drawn and quantizer.learned is None and not library.needs_tracing(x)

    def values(self, x: Tensor) -> Tensor:
        """The quantized weight.

        Raises:
            CallError: the weight or its parameters have changed since they were first used.
        """

        def made() -> tuple[Tensor, int]:
            values = self._quantizer.quantized(x)
            return values, values._version

        values, version = self._once("values", x, made)
        if values._version != version:  # what was given out was written to
            del self._made["values"]
            return self.values(x)
        # Another tensor each time, on the same memory: its attributes are the caller's.
        return values.detach()

    def codes(self, x: Tensor) -> tuple[Tensor, QParams] | None:
        """The codes of the weight and the parameters; None if it holds NaN, which has no code.

        Raises:
            CallError: as `values`.
        """
        return self._once("codes", x, lambda: self._quantizer.encoded(x))

    def _once(self, what: str, x: Tensor, make: Callable[[], _Made]) -> _Made:
        quantizer = self._quantizer
        tensors = x, quantizer.scale, quantizer.zero_point, quantizer.fixed_codes
        state = quantizer.spec, quantizer.dynamic, *map(_state_of, tensors)
        if self._state is None:
            # Once freed, an object or its memory could come back at the same address. A detached tensor keeps the
            # memory, whatever `data` the parameter gets.
            self._state = state
            self._held = [held for tensor in tensors if tensor is not None for held in (tensor, tensor.detach())]
        elif self._state != state:
            raise CallError(
                f"the weight of {quantizer.name or quantizer}, its scale or its specification changed inside "
                "cached_weights, which quantizes a weight once; change it outside of the context, and enter it again"
            )
        if what not in self._made:
            # Plain tensors, which calls outside of inference mode may use.
            with torch.inference_mode(False), torch.no_grad():
                self._made[what] = make()
        return self._made[what]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _state_of(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    # Tensors made in inference mode count no changes.
    version = None if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


MERGED = "trained_merged"
"""The attribute of a weight's quantizer, and its key beside an adapter, by which the adapter was trained as merged."""


def take_flag(quantizer: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Say where an adapter that is loaded was trained as merged, and its layer adds it to the quantized weight."""
    if state_dict.pop(prefix + MERGED, None) is not None and not vars(quantizer).get(MERGED):
        warn_user(
            "the adapter was trained as it will be merged (QATCallback, Training or train_merged), and computes "
            "something else beside quantized layers; call fakequant.integrations.peft.train_merged(model)",
            StaleScaleWarning,
        )


def join_adapters(quantizer: nn.Module) -> None:
    """Make a quantizer one of the modules that peft saves and does not freeze, in place; nothing without peft."""
    quantizer.__class__ = joined_class(type(quantizer))


def joined_class(cls: type[Any]) -> type[Any]:
    """The class of quantizers that `join_adapters` makes of another; the same class where peft is not imported."""
    wrapper = getattr(sys.modules.get("peft.utils.other"), "AuxiliaryTrainingWrapper", None)
    if wrapper is None or issubclass(cls, wrapper):
        return cls
    if cls not in _made:
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _made[cls] = type(cls.__name__, (_Joined, cls, wrapper), {**named, "joined_from": cls})
    return _made[cls]


def copies_called(model: nn.Module, path: str) -> list[str]:
    """The paths of the copies that peft calls in place of a part that `modules_to_save` names; none for other parts.

    `head.original_module.dense` has the copy `head.modules_to_save.default.dense`, and one for each other adapter.
    """
    wrapper = getattr(sys.modules.get("peft.utils.other"), "ModulesToSaveWrapper", None)
    parts = path.split(".")
    for place, part in enumerate(parts):
        owner = model.get_submodule(".".join(parts[:place])) if part == "original_module" else None
        if wrapper is not None and isinstance(owner, wrapper):
            start = ".".join([*parts[:place], "modules_to_save"])
            return [".".join([start, name, *parts[place + 1 :]]) for name in model.get_submodule(start)._modules]
    return []


_made: dict[type[Any], type[Any]] = {}


class _Joined:
    """The methods of peft's wrappers for a quantizer, which wraps nothing and serves all adapters alike."""

    _adapters: frozenset[str] = frozenset()
    _active_adapter: tuple[()] | list[str] | str = ()
    _disable_adapters = False

    def enable_adapters(self, enabled: bool) -> None:
        """Nothing is switched off: the layer without adapters has the same ranges."""

    def check_set_adapter(self, adapter_name: str | list[str]) -> None:
        self._active_adapter = adapter_name

    def set_adapter(self: Any, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        for parameter in self.parameters():
            parameter.requires_grad_(not inference_mode)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        """The ranges stay, because the model needs them."""
        self._active_adapter = new_active_adapters or ()

    def _get_available_adapters(self) -> set[str]:
        return set()

    def adapter_state_dict(self, adapter_name: str, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of an adapter without the codes of weights, which are as large as the model and saved with it."""
        flag = {MERGED: torch.ones((), dtype=torch.uint8)} if vars(self).get(MERGED) else {}
        return {key: value for key, value in state_dict.items() if key != KEY and not key.endswith(f".{KEY}")} | flag

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        """No key is renamed: `load_state_dict` finds those that were saved."""
        return {}

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: Any) -> Any:
        return self

    def register_forward_pre_hook(self: Any, hook: Any, **options: Any) -> RemovableHandle:
        """Register a hook, but leave out peft's, which gives its layers the adapter of each example."""
        if "adapter_names" in getattr(hook, "keywords", {}):
            return RemovableHandle(OrderedDict())
        return nn.Module.register_forward_pre_hook(self, hook, **options)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = object.__reduce_ex__(self, max(int(protocol), 2))
        return (_new, (self.joined_from,), *state)


def _new(cls: type[Any]) -> Any:
    made: Any = joined_class(cls)
    return made.__new__(made)


class Quantizer(GlobalScale, KeptCodes, RangesByValue):
    """Fake-quantizes one tensor of a model, with parameters that calibration, a checkpoint or training sets.

    Args:
        spec: how to quantize.
        kind: activations or a weight, see `Kind`.
        dynamic: take the range from every tensor anew instead of calibrating it.

    `scale` and `zero_point` are buffers (None until calibrated); the scale stays float32 when the model becomes half
    precision. After `learn(method)` they are None, and a submodule named by the method holds parameters that training
    moves: `learned`.

    >>> quantizer = Quantizer(QuantSpec("int8"))
    >>> quantizer.set_range(Range(torch.tensor([-1.27]), torch.tensor([1.0])))
    >>> quantizer(torch.tensor([0.104, 5.0]))
    tensor([0.1000, 1.2700])
    >>> quantizer
    Quantizer(int8 per_tensor, input, scale 0.01)
    """

    scale: Tensor | None
    zero_point: Tensor | None
    collected: Calibrator | None = None
    """What the last `fakequant.calibrate` collected for an input, from which `recalibrate` finds another range."""
    pinned: bool
    """Whether calibration and training leave the parameters as they are: those that an engine gives a function."""
    follows: bool | None = None
    """Whether a weight was zero when its range was looked for, and goes on without one."""
    mesh: Mesh | None = None
    """What the quantizers of a model know together of tensor parallelism."""
    is_unreached = False
    """Whether the example of `prepare` did not come to it."""
    is_same_everywhere = False
    """Whether its processes were seen to have the same values."""

    def __init__(self, spec: QuantSpec | str, *, kind: Kind = Kind.INPUT, dynamic: bool = False) -> None:
        super().__init__()
        self.spec = as_spec(spec)
        self.kind: Kind = kind
        self.dynamic = dynamic
        self.mode = Mode.QUANTIZE
        self.name = ""
        self.pinned = False
        self.calibrator: Calibrator | None = None
        self._method = ""
        self._cache: WeightCache | None = None
        self.fitted_to = self.seen = self.follows = None
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)
        self.register_buffer("global_scale", None)
        join_adapters(self)

    @property
    def learned(self) -> LearnedRange | None:
        """What training moves, or None while the parameters are fixed."""
        module = self._modules.get(self._method)
        return module if isinstance(module, LearnedRange) else None

    @property
    def trained_spec(self) -> QuantSpec:
        """The specification, with the gradient by which a range is learned while one is."""
        return self.spec if (learned := self.learned) is None else learned.spec

    @property
    def calibrated(self) -> bool:
        """Whether the parameters are set, fixed or learned."""
        learned = self.learned
        return self.scale is not None or (learned is not None and learned.started)

    @property
    def needs_calibration(self) -> bool:
        """Whether the quantizer cannot work before it has seen data."""
        return self.kind is Kind.INPUT and not self.dynamic and not self.calibrated

    @property
    def quantizes(self) -> bool:
        """Whether calls give quantized tensors; recorded runs ask every module that has this."""
        return self.mode is Mode.QUANTIZE

    def __call__(self, x: Tensor) -> Tensor:
        # Hooks for all modules, as torch's trackers have, follow a gradient that a weight does not have here.
        if _all_modules._global_forward_pre_hooks and not torch.is_grad_enabled() and x.requires_grad is True:
            x = x.detach()
        mesh = self.mesh
        if (type(x) not in PLAIN or (mesh is not None and mesh.group is not None)) and self.mode is not Mode.OFF:
            x = known_part(self, x)
        return nn.Module.__call__(self, x)

    def forward(self, x: Tensor) -> Tensor:
        """x, observed or fake-quantized as the mode says; shape and dtype stay."""
        if self.mode is not Mode.QUANTIZE:
            if self.mode is Mode.OBSERVE and (self.kind is Kind.INPUT or not self._knows_weight()):
                self.observe(x)
            return x
        if type(x) not in PLAIN and isinstance(x, UNUSUAL):  # twice as fast as isinstance for plain tensors
            return self.of_unusual(x)
        if self.kind is Kind.WEIGHT and (self._method or self._buffers["scale"] is not None):
            look(self, x)
        if self._cache is not None and self._cache.serves(x):
            return self._cache.values(x)
        if self._buffers["fixed_codes"] is not None and (y := self.values_of_codes(x)) is not None:
            return y
        if (scale := self._buffers["scale"]) is not None and not self.dynamic and self.by_value is None:
            try:
                return library.quantize_by(x, self.spec, scale, self._buffers["zero_point"])
            except ShapeError as error:
                raise self._misfit(x) from error
        if self.dynamic or (self.kind is Kind.WEIGHT and not self.calibrated):
            return self.fake_quantize_by_input(x)
        return self._by_learned(x)

    def _by_learned(self, x: Tensor) -> Tensor:
        learned = self.learned
        if self.by_value is not None:
            return self.fake_quantize_by_value(x)
        if learned is None:  # never calibrated, as `qparams` will say
            return library.fake_quantize(x, self.qparams(x), self.spec)
        if self.training and x.requires_grad and torch.is_grad_enabled():
            learned.warn_if_frozen()
        y = learned.fake_quantize_in_one_call(x, examples=self.kind is Kind.INPUT)
        return learned.fake_quantize(x, self.qparams(x)) if y is None else y

    def codes(self, x: Tensor) -> tuple[Tensor, QParams] | None:
        """The codes [shape of x] and the parameters, without gradients; None if x holds NaN, which has no code."""
        if self.kind is Kind.WEIGHT and (self._method or self._buffers["scale"] is not None):
            look(self, x)
        return self._cache.codes(x) if self._cache is not None and self._cache.serves(x) else self.encoded(x)

    def encoded(self, x: Tensor) -> tuple[Tensor, QParams] | None:
        """`codes`, without a look at whether the parameters still fit."""
        if (fixed := self.codes_of_weight(x)) is not None:
            return fixed, self.qparams(x)
        scale = None if self.dynamic or self.by_value is not None else self._buffers["scale"]
        params = self.qparams(x) if scale is None else QParams(scale, self._buffers["zero_point"])
        try:
            codes = library.encode(x, params, self.spec)
        except ShapeError as error:
            raise self._misfit(x) from error
        return None if codes is None else (codes, params)

    @property
    def follows_input(self) -> bool:
        """Whether the range is that of every tensor."""
        return self.dynamic or not self.calibrated

    def qparams(self, x: Tensor) -> QParams:
        """The parameters with which x would be quantized; while they are learned, differentiable.

        Raises:
            CalibrationError: a static input quantizer that was not calibrated.
            ShapeError: the parameters were made for tensors of another shape.
        """
        if not self.dynamic and (scale := self._buffers["scale"]) is not None:
            if self.by_value is not None:
                return self.params_by_value(x)
            return self._fitted(QParams(scale, self._buffers["zero_point"]), x)
        if self.needs_calibration:
            raise CalibrationError(
                f"the quantizer {self.name or self} has not been calibrated; "
                "call fakequant.calibrate(model, batches), or load a checkpoint"
            )
        if self.follows_input:
            return self.qparams_by_input(x)
        return self._fitted(self._current(self._elements(x)), x)

    def _fitted(self, params: QParams, x: Tensor) -> QParams:
        """Parameters in the shape that broadcasts with x."""
        groups = self.spec.granularity.group_shape(shape_of(x))
        if groups == tuple(shape_of(params.scale)):
            return params
        if params.scale.numel() == 1 == math.prod(groups):  # one scale fits tensors of any rank
            zero_point = None if params.zero_point is None else params.zero_point.reshape(groups)
            return QParams(params.scale.reshape(groups), zero_point)
        raise self._misfit(x)

    def _misfit(self, x: Tensor) -> ShapeError:
        cure = "calibrate it on tensors of that shape"
        if self.kind is Kind.WEIGHT:
            cure = "the weight changed its shape since then: call fakequant.calibrate(model, pattern="
            cure += f"{self.name or '*_weight_quantizer'!r}), which needs no batches"
        return ShapeError(
            f"the quantizer {self.name or self} has a scale of shape {list(self._current().scale.shape)}, which does "
            f"not fit {self.spec.granularity} on a tensor of shape {list(x.shape)}; {cure}"
        )

    def _current(self, elements: int = 1) -> QParams:
        """The parameters of a calibrated quantizer, as they are now; of ranges by a value, those of all bins."""
        if self.learned is not None:
            return self.learned.qparams(elements)
        assert self.scale is not None
        return QParams(self.scale, self.zero_point)

    def _elements(self, x: Tensor) -> int:
        return shared_by(self.spec.granularity, x.shape, examples=self.kind is Kind.INPUT)

    def set_range(self, range: Range) -> None:
        """Set scale and zero point by a range [groups, axes kept], of zeros by `lend`; learning starts from there."""
        self.set_qparams(qparams_of_range(lend(range, self.spec), self.spec))

    def set_qparams(self, params: QParams, by_value: ByValue | None = None) -> None:
        """Set scale and zero point, with `by_value` those of each bin; what is learned starts again from there."""
        with restore_on_error(state_of([self])):
            self.release_codes()
            self._set(params)
            self.by_value = by_value

    def _set(self, params: QParams) -> None:
        """`set_qparams`, with codes that stand if the weight has their values."""
        self.fitted_to = self.seen = self.follows = self._judged = self._others = None
        if self.learned is not None:
            self.learned.start(params)
            return
        with torch.inference_mode(mode=False):  # else they could neither be trained nor loaded into
            own = (params.scale, params.zero_point)
            self.scale, self.zero_point = (None if x is None else x.detach().clone() for x in own)

    def freeze(self, x: Tensor) -> None:
        """Fix the parameters as they are for x now, those of groups of zeros by `lend`."""
        range = library.measure(x, self.spec.granularity)
        lent = range if bool(range.amax.all()) else lend(range, self.spec)
        given = lent is range and not self.follows_input
        self.set_qparams(self.qparams(x) if given else library.choose(x, self.spec, lent))

    def reset(self) -> None:
        """Forget the parameters."""
        self._take_away_learned()
        self.release_codes()
        self.scale = self.zero_point = self.global_scale = self.fitted_to = self.seen = self.follows = None
        self.by_value = None

    def learn(self, method: str = "lsq", **options: Any) -> None:
        """Make the range something that training moves, beginning where it is now.

        Args:
            method: one of `fakequant.nn.learned_ranges()`: "lsq" (the step), "lsq_plus" (step and offset), "pact" (the
                clip value) or "tqt" (the logarithm of a power-of-two threshold).
            options: of the method, such as gradient_factor=False.

        Raises:
            ConfigError: an unknown method or option, one that cannot serve the specification, or nothing to learn,
                because the range is dynamic or not yet there.

        >>> quantizer = Quantizer("int8")
        >>> quantizer.set_range(Range(torch.tensor([-1.27]), torch.tensor([1.0])))
        >>> quantizer.learn("lsq")
        >>> quantizer
        Quantizer(int8 per_tensor, input, scale 0.01, learned by lsq)
        >>> [name for name, _ in quantizer.named_parameters()]
        ['lsq.step']
        """
        name = self.name or str(self)
        if self.dynamic:
            raise ConfigError(f"the quantizer {name} is dynamic: its range comes from every tensor anew")
        if not self.calibrated:
            raise ConfigError(f"the quantizer {name} has no range to learn; calibrate it first")
        self.check_learns()
        with self._named_errors():
            learned = make_learned_range(method, self.spec, **options)
        if self.learned is not None and (self._method, self.learned.options()) == (method, learned.options()):
            self.learned.requires_grad_()
            return
        with torch.no_grad(), restore_on_error(state_of([self])):
            learned.start(self._current())
            self.attach_learned(learned)

    def attach_learned(self, learned: LearnedRange) -> None:
        """Learn by an object that has its parameters, or gets them from a state dict."""
        self._take_away_learned()
        self.scale = self.zero_point = None
        self._method = learned.method
        self.add_module(learned.method, learned)
        join_adapters(self)  # here, because peft freezes parameters when it wraps a model

    def stop_learning(self) -> None:
        """Fix the parameters at what was learned; nothing happens where nothing is learned."""
        if self.learned is None:
            return
        with torch.no_grad(), restore_on_error(state_of([self])):
            scale, zero_point = self._current()[:2]
            self._take_away_learned()
            self._set(QParams(scale, None if zero_point is None else zero_point.to(torch.int32)))
            self._stop_keeping()

    def _take_away_learned(self) -> None:
        self._modules.pop(self._method, None)
        self._method = ""

    def observe(self, x: Tensor) -> None:
        """Show x to the calibrator.

        Raises:
            CalibrationError: x holds NaN or inf; the message names the quantizer.
        """
        # Not `_named_errors`: entering a context takes as long as 5,000 values, for every batch and layer.
        try:
            if self.calibrator is None:
                raise CalibrationError("in mode OBSERVE without a calibrator; call fakequant.calibrate")
            self.calibrator.observe(x if type(x) is Tensor else whole(x))
        except (CalibrationError, ConfigError, ShapeError) as error:
            raise self.named(error) from error

    def _knows_weight(self) -> bool:
        """Whether the calibrator has seen the weight: it comes with every batch, and counts once."""
        return self.calibrator is not None and self.calibrator.observed

    def observed_range(self) -> Range:
        """The range that the calibrator finds for what it was shown."""
        with self._named_errors():
            if self.calibrator is None:
                raise CalibrationError("nothing was observed; call fakequant.calibrate")
            return self.calibrator.compute_range()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (CalibrationError, ConfigError, ShapeError) as error:
            raise self.named(error) from error

    def named(self, error: Exception) -> Exception:
        """An error with the name of the quantizer."""
        return type(error)(f"{self.name or self}: {error}")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        join_adapters(self)  # here, because peft asks for the state of the model before it looks for what to save
        noted = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        noted |= {"fitted_to": self.fitted_to, "spec": self._numbers()}
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Become what the state says: fixed, or learned by the method that its keys name."""
        take_flag(self, state_dict, prefix)
        methods = {key.removeprefix(prefix).split(".")[0] for key in state_dict if key.startswith(prefix)}
        stated = sorted(methods & set(learned_ranges()))
        if stated and stated[0] != self._method:
            self.attach_learned(make_learned_range(stated[0], self.spec))
        elif prefix + "scale" in state_dict:
            self._take_away_learned()
        if methods & {"scale", *stated}:
            self.fitted_to, self.seen = args[0].get("fitted_to"), None
            if (other := args[0].get("spec", self._numbers())) != self._numbers():
                args[4].append(
                    f"{prefix.removesuffix('.')} is {self._numbers()}, and its state is of {other}: prepare the model "
                    "with the configuration that the state is of"
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _numbers(self) -> str:
        """The specification without what changes no scale: the gradient, and rounding to nearest or by chance."""
        return str(self.spec.replace(gradient=Gradient.CODE_RANGE, rounding=Rounding.NEAREST_EVEN))

    def __repr__(self) -> str:
        words = [str(self.spec), self.kind.value]
        if self.mode is not Mode.QUANTIZE:
            words.append(self.mode.value)
        if self.dynamic:
            words.append(
                "dynamic" if self.global_scale is None else f"dynamic under {1 / self.global_scale.item():.4g}"
            )
        elif not self.calibrated:
            words.append("follows the weight" if self.kind is Kind.WEIGHT else "not calibrated")
        else:
            words += self._scale_words()
        if self.fixed_codes is not None:
            words.append("fixed codes")
        return f"Quantizer({', '.join(words)})"

    def _scale_words(self) -> list[str]:
        scale = self._current().scale.detach()
        if not is_concrete(scale):  # an exporter's, or a transform's: `torch.vmap` asks for the name of what it calls
            return ["calibrated"]
        lowest, highest = scale.min().item(), scale.max().item()
        many = f"scale {lowest:.4g} to {highest:.4g} [{scale.numel()}]"
        words = [f"scale {lowest:.4g}" if scale.numel() == 1 else many]
        return [*words, *self.words_by_value(), *([f"learned by {self._method}"] if self.learned is not None else [])]


def quantizers(model: nn.Module) -> dict[str, Quantizer]:
    """All quantizers of a model by their path in it."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
