"""The quantizer of one tensor of a model: it passes the tensor on, shows it to a calibrator, or fake-quantizes it.

peft trains and saves only the adapter's parameters, and what modules of its class `AuxiliaryTrainingWrapper` name. If
peft is imported, a quantizer becomes such a module, so that its ranges train and are saved with the adapter, without a
call of the user.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.fx import Proxy, Tracer
from torch.nn.modules import module as _all_modules
from torch.utils.hooks import RemovableHandle

from fakequant.calibration import Calibrator
from fakequant.distributed import gather, gathered, is_sharded
from fakequant.errors import (
    CalibrationError,
    CallError,
    ConfigError,
    QParamsError,
    ShapeError,
    StaleScaleWarning,
    warn_user,
)
from fakequant.functional import choose_qparams
from fakequant.memory import separate
from fakequant.nn.device import CodeGrid, Device, DeviceTensor, Kept, plain, stored
from fakequant.nn.ranges import (
    GLOBAL_SCALE,
    ByValue,
    LearnedRange,
    QuantizerPart,
    check_global_scale,
    learned_ranges,
    make_learned_range,
    params_of_call,
    params_under,
    shared_by,
)
from fakequant.nn.sharded import Mesh, fingerprint, known_parts
from fakequant.nn.stored import StoredWeight
from fakequant.numerics import reference
from fakequant.numerics.formats.floats import IntegerFormat, as_integers, check_codes, integers_of, of_integers
from fakequant.numerics.granularity import PerBlock, PerChannel, PerTensor
from fakequant.numerics.qparams import PLAIN, QParams, Range, check_scale, fill_empty_groups, is_concrete, shape_of
from fakequant.numerics.qparams import choose_qparams as qparams_of_range
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding, as_spec
from fakequant.ops import library
from fakequant.restore import restore_on_error, state_of

_Made = TypeVar("_Made")

_UNUSUAL = (Proxy, StoredWeight)
"""Types of arguments that hold no numbers: a proxy of a tracer, and a weight that is stored as codes."""
_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes to which a model with fixed codes may have been converted, and back, which rounds its weights."""
_TOLERATED = 0.1
"""Relative change of a group's largest magnitude that makes scales stale; gentle fine-tuning stays below."""
KEY = "fixed_codes"
"""The name of the buffer of codes, and the last part of its key in a state dict."""


def as_leaf(module: nn.Module, *args: Any) -> Any:
    """Record a call of `module` in the torch.fx trace of a proxy in `args`, and return the proxy of the result.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), "INT8_WEIGHT_ONLY")
    >>> [str(node) for node in torch.fx.symbolic_trace(model).graph.nodes]
    ['input_1', '_0', '_1', 'output']
    """
    tracer = next(value.tracer for value in args if isinstance(value, Proxy))
    assert isinstance(tracer, Tracer), "other tracers hand out tensors"
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, {})


def magnitudes(spec: QuantSpec, weight: Tensor) -> Tensor:
    """The largest magnitude of every group of a weight, in the weight's dtype."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return library.measure(weight.detach(), spec.granularity).amax.to(weight.dtype)


def weight_version(weight: Tensor) -> Any:
    """A value that differs after nearly every change of a weight, because it has torch's count of writes.

    torch does not count writes through `data`, by which peft merges adapters. For a weight on the CPU, the value
    therefore also has the first element.
    """
    if type(weight) is not nn.Parameter or weight.is_inference():
        return type(weight)
    place = weight.data_ptr()  # 0 of an empty or a meta tensor
    first = ctypes.string_at(place, weight.element_size()) if place and weight.is_cpu else b""
    return weight._version, place, first


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two scales or zero points are both None, the same tensor, or equal in value."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def are_equal(one: Tensor, other: Tensor) -> bool:
    """`torch.equal` for tensors of one shape and dtype; faster, because bits are first compared as int64."""
    plain = one.is_contiguous() and other.is_contiguous() and one.numel() * one.element_size() % 8 == 0
    same_bits = plain and torch.equal(*(own.detach().view(-1).view(torch.int64) for own in (one, other)))
    return same_bits or torch.equal(one, other)  # -0.0 is 0.0, which a step of 0 may make of it


def version_of(tensor: Tensor) -> tuple[int, int | None]:
    """The id of a tensor and its count of writes, which is None for a tensor that was made in inference mode."""
    return id(tensor), None if tensor.is_inference() else tensor._version


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling a module only runs the `forward` of its class: it has no hooks and no `forward` in its dict."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
    )


class WeightCache:
    """A cache of the quantized values and codes of a weight, filled at the first use; copies and pickles are None."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._state: tuple[Any, ...] | None = None
        self._held: list[Tensor] = []
        self._made: dict[str, Any] = {}

    def serves(self, x: Tensor) -> bool:
        """Whether the cache can be used for x.

        x must be a parameter, outside of traces and without a wanted gradient; the range must not be learned, and
        rounding not stochastic.
        """
        if torch.compiler.is_compiling() or not isinstance(x, nn.Parameter) or x.is_inference():
            return False
        if torch.is_grad_enabled() and x.requires_grad:
            return False
        quantizer = self._quantizer
        drawn = quantizer.spec.rounding is Rounding.STOCHASTIC
        return not drawn and quantizer.learned is None and not library.needs_tracing(x)

    def values(self, x: Tensor) -> Tensor:
        """The quantized weight [shape of x]; CallError if the weight or its scale changed since the first use."""

        def made() -> tuple[Tensor, int]:
            values = self._quantizer.quantized(x)
            return values, values._version

        values, version = self._once("values", x, made)
        if values._version != version:  # the caller wrote to it
            del self._made["values"]
            return self.values(x)
        # Another tensor each time, on the same memory: its attributes are the caller's.
        return values.detach()

    def codes(self, x: Tensor) -> tuple[Tensor, QParams] | None:
        """What `Quantizer.codes` returns for the weight x; raises CallError like `values`."""
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
"""The name of the flag of adapters trained as merged: in the weight's quantizer, and beside the adapter's keys."""


def join_adapters(quantizer: nn.Module) -> None:
    """Change the class of a quantizer so that peft saves it and does not freeze it; without peft, do nothing."""
    quantizer.__class__ = joined_class(type(quantizer))


def joined_class(cls: type[Any]) -> type[Any]:
    """A subclass of a quantizer's class, whose objects peft saves and does not freeze; `cls` itself without peft."""
    wrapper = getattr(sys.modules.get("peft.utils.other"), "AuxiliaryTrainingWrapper", None)
    if wrapper is None or issubclass(cls, wrapper):
        return cls
    if cls not in _made:
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _made[cls] = type(cls.__name__, (_Joined, cls, wrapper), {**named, "joined_from": cls})
    return _made[cls]


def copies_called(model: nn.Module, path: str) -> list[str]:
    """The paths of peft's copies (`modules_to_save`) of the module at `path`, which peft calls in place of the module.

    [] if peft has no copies of the module.

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
    """Methods by which peft treats a quantizer like its wrappers; a quantizer has the same range for all adapters."""

    _adapters: frozenset[str] = frozenset()
    _active_adapter: tuple[()] | list[str] | str = ()
    _disable_adapters = False

    def enable_adapters(self, enabled: bool) -> None:
        """Do nothing: the layer has the same ranges without adapters."""

    def check_set_adapter(self, adapter_name: str | list[str]) -> None:
        self._active_adapter = adapter_name

    def set_adapter(self: Any, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        for parameter in self.parameters():
            parameter.requires_grad_(not inference_mode)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        """Do nothing: the model still needs the range."""
        self._active_adapter = new_active_adapters or ()

    def _get_available_adapters(self) -> set[str]:
        return set()

    def adapter_state_dict(self, adapter_name: str, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state that peft saves with an adapter: all except fixed codes, which are saved with the model."""
        flag = {MERGED: torch.ones((), dtype=torch.uint8, device="cpu")} if vars(self).get(MERGED) else {}
        return {key: value for key, value in state_dict.items() if key != KEY and not key.endswith(f".{KEY}")} | flag

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        """An empty map, because no key is renamed."""
        return {}

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: Any) -> Any:
        return self

    def register_forward_pre_hook(self: Any, hook: Any, **options: Any) -> RemovableHandle:
        """Register a hook, except for peft's hooks that select an adapter for each example."""
        if "adapter_names" in getattr(hook, "keywords", {}):
            return RemovableHandle(OrderedDict())
        return nn.Module.register_forward_pre_hook(self, hook, **options)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = object.__reduce_ex__(self, max(int(protocol), 2))
        return (_new, (self.joined_from,), *state)


def _new(cls: type[Any]) -> Any:
    made: Any = joined_class(cls)
    return made.__new__(made)


class Mode(Enum):
    """Whether a quantizer passes a tensor on, shows it to a calibrator, or fake-quantizes it."""

    OFF = "off"
    """Returns the tensor unchanged."""
    OBSERVE = "observe"
    """Shows the tensor to the calibrator, and returns it unchanged."""
    QUANTIZE = "quantize"
    """Returns the fake-quantized tensor."""


class Kind(Enum):
    """Whether a quantizer quantizes activations or a weight, which decides its range before calibration."""

    INPUT = "input"
    """Activations: a static range must come from calibration."""
    WEIGHT = "weight"
    """A parameter: until calibration fixes a range, each call uses the range of the parameter's values."""


class Quantizer(QuantizerPart):
    """Fake-quantizes one tensor of a model, with parameters that calibration, a checkpoint or training sets.

    Args:
        spec: how to quantize.
        kind: activations or a weight, see `Kind`.
        dynamic: take the range from every tensor anew instead of calibrating it.

    `scale` and `zero_point` are buffers (None until calibrated); the scale stays float32 in half precision. With
    `by_value`, their first axis has an entry for each bin of the value. After `learn(method)` both are None, and
    `learned`, a submodule under the name of the method, holds parameters that training moves. If the quantizer
    is dynamic, the buffer `global_scale` is 1 / the fixed per-tensor scale that multiplies the scales of blocks.

    The buffer `fixed_codes` is None, or holds the codes that a solver or a file chose, as integers in the shape of the
    weight. The codes are valid while the weight equals their values, bit for bit. If quantizing these values gives the
    same codes, calls quantize as usual; otherwise each call compares the weight with the values.

    >>> quantizer = Quantizer(QuantSpec("int8"))
    >>> quantizer.set_range(Range(torch.tensor([-1.27]), torch.tensor([1.0])))
    >>> quantizer(torch.tensor([0.104, 5.0]))
    tensor([0.1000, 1.2700])
    >>> quantizer
    Quantizer(int8 per_tensor, input, scale 0.01)
    """

    scale: Tensor | None
    zero_point: Tensor | None
    global_scale: Tensor | None
    fixed_codes: Tensor | None
    by_value: ByValue | None = None
    """The value of a call, such as a timestep, that chooses one of several ranges."""
    collected: Calibrator | None = None
    """The calibrator of the last `fakequant.calibrate` of an input, from which `recalibrate` makes another range."""
    device: Device | None = None
    """The engine's arithmetic that computes the codes, see `fakequant.set_execution`; None: calls fake-quantize."""
    fixes_global: bool = False
    """Whether `fakequant.calibrate` fixes the global scale of a dynamic input, as the engine does."""
    range_group: str = ""
    """The name of the group of quantizers that share one calibrated range, as an engine merges layers; "" for none."""
    pinned: bool
    """Whether calibration and training must keep the parameters, because an engine prescribes them for a function."""
    is_zero_weight: bool | None = None
    """Whether the weight was all zeros in calibration, and therefore has no range."""
    mesh: Mesh | None = None
    """The processes of tensor parallelism, shared by the quantizers of a model."""
    is_unreached = False
    """Whether the example of `prepare` never called this quantizer."""
    is_same_everywhere = False
    """Whether a call has shown that this tensor has the same values in all processes."""
    range_of_weight: Tensor | None = None
    """The largest magnitude of each group of the weight when the parameters were set."""
    last_weight: Any = None
    """The `weight_version` of the weight in the last call in eval mode."""
    keeps_codes = False
    """Whether fixed codes stay while training moves the learned scale, until `stop_learning`."""
    _kept: Kept | None = None
    """The `CodeGrid`, packed weight and constants that calls under a device reuse."""
    _weight_pending = False
    """Whether the next call must set its weight to the dequantized fixed codes."""
    _is_trained = False
    """Whether the fixed codes were valid in a call of training."""
    _last_check: tuple[Any, bool] | None = None
    """The `_key` of the last weight, and whether quantizing that weight would not return its fixed codes."""
    _differs: bool | None = None
    """Whether quantizing the values of the fixed codes, in the last weight's dtype, gives other codes; or None."""

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
        self.range_of_weight = self.last_weight = self.is_zero_weight = None
        for name in (KEY, "scale", "zero_point", GLOBAL_SCALE):
            self.register_buffer(name, None)
        join_adapters(self)

    @property
    def learned(self) -> LearnedRange | None:
        """The learned range, whose parameters training moves, or None while the range is fixed."""
        module = self._modules.get(self._method)
        return module if isinstance(module, LearnedRange) else None

    @property
    def trained_spec(self) -> QuantSpec:
        """The specification; while the range is learned, with the gradient of the learning method."""
        return self.spec if (learned := self.learned) is None else learned.spec

    @property
    def calibrated(self) -> bool:
        """Whether scale and zero point are set, as fixed values or as learned parameters."""
        learned = self.learned
        return self.scale is not None or (learned is not None and learned.started)

    @property
    def needs_calibration(self) -> bool:
        """Whether the quantizer needs data: it is of an input, not dynamic, and has no range yet."""
        return self.kind is Kind.INPUT and not self.dynamic and not self.calibrated

    @property
    def scales_each_call(self) -> bool:
        """Whether each call computes a new range from its tensor."""
        return self.dynamic or not self.calibrated

    @property
    def quantizes(self) -> bool:
        """Whether calls return quantized tensors; recorded runs know quantizers by this attribute."""
        return self.mode is Mode.QUANTIZE

    def _title(self) -> str:
        return f"the quantizer {self.name or self}"

    # Calls.

    def __call__(self, x: Tensor) -> Tensor:
        # Hooks for all modules, as of torch's trackers, follow a gradient that a weight does not have here.
        if _all_modules._global_forward_pre_hooks and not torch.is_grad_enabled() and x.requires_grad is True:
            x = x.detach()
        mesh = self.mesh
        if (type(x) not in PLAIN or (mesh is not None and mesh.group is not None)) and self.mode is not Mode.OFF:
            if is_sharded(x):
                observed = self.kind is Kind.INPUT and self.mode is Mode.OBSERVE
                x = known_parts(str(self.name or self), self.spec, x, observed=observed)
            # Proxies of torch.fx and stored codes are no tensors; a collective that is not waited for is a subclass.
            elif self.kind is Kind.INPUT and isinstance(x, Tensor) and not isinstance(x, FakeTensor):
                self._check_same(x)
        return nn.Module.__call__(self, x)

    def _grid(self, x: Tensor) -> CodeGrid | None:
        """The `CodeGrid` of the codes that `device` stores for x; None in a trace, or if calls are simulated."""
        if torch.compiler.is_compiling() or (not isinstance(x, DeviceTensor) and library.needs_tracing(x)):
            return None
        scale, fmt = self._buffers["scale"], self.spec.format
        kept = self._kept = self._kept or Kept()
        # The reason takes 4 us of each call.
        state = None if scale is None else (self.device, self.spec, self.dynamic, self.by_value)
        if state is None or kept.stores != state:
            if self.why_simulated(self.device) is not None:
                return None
            kept.stores = state
        if scale is None or self.kind is Kind.WEIGHT:
            params = self.qparams(plain(x))
        else:  # of one element, which fits tensors of any shape
            params = QParams(scale, self._buffers["zero_point"])
        return kept.grid(params.scale, params.zero_point, int(fmt.quant_min), int(fmt.quant_max))

    @property
    def may_be_skipped(self) -> bool:
        """Whether callers may compute codes without calling it: it has no hooks and no other `forward`."""
        return type(self).forward is Quantizer.forward and has_no_hooks(self)

    def _codes_alone(self, x: Tensor) -> Tensor | None:
        """The codes that `codes` returns, without the parameters; None if x holds NaN."""
        found = self.codes(x)
        return None if found is None else found[0]

    def why_simulated(self, device: Device | None) -> str | None:
        """The reason why calls fake-quantize and do not compute codes of `device`; None if they compute codes."""
        spec = self.spec
        if device is None or not isinstance(spec.format, IntegerFormat) or not spec.arithmetic.is_linear:
            return f"{spec} has no codes of a device"
        is_wide = spec.format.bits == 16 and device.wide and self.kind is not Kind.WEIGHT
        if not (is_wide or spec.format.bits <= 8) or spec.offset is not None:
            return f"no rule is known for {spec}"
        if self.kind is Kind.WEIGHT:
            fits = spec.symmetric and isinstance(spec.granularity, (PerTensor, PerChannel))
            return None if fits else f"a weight has a scale for each output channel on the device, not {spec}"
        if self.dynamic or self.by_value is not None or not isinstance(spec.granularity, PerTensor):
            return f"a device has one fixed scale for a tensor, not {spec}"
        if device.unsigned and spec.format.signed:
            return f"the device has unsigned codes of activations, not {spec}"
        return "it has no range yet: call fakequant.calibrate before" if self.scales_each_call else None

    def forward(self, x: Tensor) -> Tensor:
        """x, unchanged or fake-quantized as the mode says, in its shape and dtype; OBSERVE shows a calibrator x."""
        if self.mode is not Mode.QUANTIZE:
            # A weight comes with every batch, and counts once.
            is_seen = self.kind is Kind.WEIGHT and self.calibrator is not None and self.calibrator.observed
            if self.mode is Mode.OBSERVE and not is_seen:
                self.observe(x)
            return x
        if self.device is not None and (grid := self._grid(x)) is not None:
            encode = None if self.spec.rounding is Rounding.STOCHASTIC else self._codes_alone
            kept = self._kept if self.kind is Kind.WEIGHT else None
            return stored(self.device, x, grid, self._simulated, encode, kept)
        return self._simulated(x)

    def _simulated(self, x: Tensor) -> Tensor:
        if type(x) not in PLAIN and isinstance(x, _UNUSUAL):  # twice as fast as isinstance for plain tensors
            if isinstance(x, Proxy):
                return as_leaf(self, x)
            return self._of_stored(x) if self.kind is Kind.WEIGHT else self(x.values())
        if self.kind is Kind.WEIGHT:
            self._check_fresh(x)
        if self._cache is not None and self._cache.serves(x):
            return self._cache.values(x)
        if self._buffers[KEY] is not None and (y := self.values_of_codes(x)) is not None:
            return y
        if (scale := self._buffers["scale"]) is not None and not self.dynamic and self.by_value is None:
            try:
                return library.quantize_by(x, self.spec, scale, self._buffers["zero_point"])
            except ShapeError as error:
                raise self._misfit(x) from error
        if self.dynamic or (self.kind is Kind.WEIGHT and not self.calibrated):
            if self._buffers[GLOBAL_SCALE] is None:
                return library.fake_quantize_dynamic(x, self.spec)
            return library.quantize_by(x, self.spec, self.qparams(x).scale)
        if self.by_value is not None:
            return self.fake_quantize_by_value(x)
        if (learned := self.learned) is None:  # never calibrated, as `qparams` will say
            return library.fake_quantize(x, self.qparams(x), self.spec)
        if self.training and x.requires_grad and torch.is_grad_enabled():
            learned.warn_if_frozen()
        y = learned.fake_quantize_in_one_call(x, examples=self.kind is Kind.INPUT)
        return learned.fake_quantize(x, self.qparams(x)) if y is None else y

    def fake_quantize_by_value(self, x: Tensor) -> Tensor:
        """x quantized by the range that `by_value` chooses for the call, or for each row of x if the rows differ."""
        params, spec = self._params_of_call(x)
        return library.quantize_by(x, spec, *params[:2])

    def quantized(self, x: Tensor) -> Tensor:
        """The tensor that the quantizer returns for x, but without the warning that scales are stale."""
        if type(x) is StoredWeight:
            return self._of_stored(x)
        values = self.values_of_codes(x)
        return library.fake_quantize(x, self.qparams(x), self.spec) if values is None else values

    def codes(self, x: Tensor) -> tuple[Tensor, QParams] | None:
        """The codes [shape of x] and the parameters, without gradients; None if x holds NaN, which has no code."""
        if self.kind is Kind.WEIGHT:
            self._check_fresh(x)
        return self._cache.codes(x) if self._cache is not None and self._cache.serves(x) else self.encoded(x)

    def encoded(self, x: Tensor) -> tuple[Tensor, QParams] | None:
        """What `codes` returns, but without the warning that scales are stale, and never from the cache."""
        if (fixed := self.codes_of_weight(x)) is not None:
            return fixed, self.qparams(x)
        scale = None if self.dynamic or self.by_value is not None else self._buffers["scale"]
        params = self.qparams(x) if scale is None else QParams(scale, self._buffers["zero_point"])
        try:
            codes = library.encode(x, params, self.spec)
        except ShapeError as error:
            raise self._misfit(x) from error
        return None if codes is None else (codes, params)

    def _check_same(self, x: Tensor) -> None:
        """Raise ConfigError if x is only this process's part of an activation, so that its range would be too narrow.

        A fixed per-tensor scale fits every part, and dynamic blocks have separate ranges. For other specifications the
        processes compare x in each call, until a call has shown the same values, not all equal, in all processes.
        """
        spec, mesh = self.spec, self.mesh
        if self.is_same_everywhere or mesh is None or mesh.group is None or spec.rounding is Rounding.STOCHASTIC:
            return
        granularity, fits = spec.granularity, spec.scale.granularity is None and self.learned is None
        if fits and isinstance(granularity, PerTensor) and not self.dynamic:
            return
        if fits and isinstance(granularity, PerBlock) and not granularity.pad and self.dynamic:
            return
        if torch.compiler.is_compiling():
            raise ConfigError(
                f"{self.name}: processes cannot compare this tensor under torch.compile; call the model once before it "
                "is compiled"
            )
        found = gather(fingerprint(x.detach()), mesh.group)
        if any(one != found[0] for one in found):
            raise ConfigError(
                f"{self.name or self}: parallelize_module split the layers before it, so that each process has a part "
                f"of this tensor, here of shape {list(x.shape)}. With {spec}{' dynamic' if self.dynamic else ''} each "
                "part would get a different range. Use a static per_tensor range that is not learned, or dynamic "
                "blocks, or leave the tensor in float by a rule"
            )
        self.is_same_everywhere = bool(x.numel()) and bool((x != x.flatten()[0]).any())  # zeros are equal by chance

    def _check_fresh(self, weight: Tensor) -> None:
        """Remember the weight of a call; in eval mode, warn once after each change that the scales are stale.

        A computed weight is a new tensor in every call, and is compared only in the first call after training mode.
        Sharded weights are not compared, because that takes all processes.
        """
        if torch.compiler.is_compiling() or not (self._method or self._buffers["scale"] is not None):
            return
        if self.training and self.range_of_weight is not None:
            self.last_weight = None
            return
        if (seen := weight_version(weight)) == self.last_weight or is_sharded(weight) or library.needs_tracing(weight):
            return
        self.last_weight = seen
        if self.range_of_weight is None:
            self.range_of_weight = magnitudes(self.spec, weight)
        elif self.is_stale(weight):
            warn_user(  # without the name of the layer: it is one line for all layers of a model
                "weights changed by more than 10 % since the scales of their quantizers were set, and are clipped or "
                "quantized too coarsely now; fakequant.summary(model) names them and the call that renews the scales",
                StaleScaleWarning,
            )

    def is_stale(self, weight: Tensor) -> bool:
        """Whether the largest magnitude of any group has changed by more than 10 % since the scales were set.

        A learned scale is never stale for a weight that trains with it.
        """
        before = self.range_of_weight
        if before is None or (self.learned is not None and weight.requires_grad):
            return False
        if self.spec.granularity.group_shape(weight.shape) != before.shape:
            return True
        now, before = magnitudes(self.spec, weight).double(), before.to(weight.device).double()
        return bool(((now - before).abs() > _TOLERATED * before).any())

    # Parameters.

    def qparams(self, x: Tensor) -> QParams:
        """The scale and zero point that quantize x; differentiable while the range is learned.

        Raises:
            CalibrationError: the quantizer is of an input, static, and was not calibrated.
            ConfigError: `by_value` chooses different ranges for rows of x.
            ShapeError: the scale is for tensors of another shape.
        """
        if not self.dynamic and (scale := self._buffers["scale"]) is not None:
            if self.by_value is not None:
                params, spec = self._params_of_call(x)
                if spec is self.spec:
                    return params
                raise ConfigError(
                    f"{self._title()} has ranges by {self.by_value.name}, and rows of this batch need different "
                    f"ranges, which only simulation can do; give batches of one {self.by_value.name}, or call "
                    'fakequant.set_execution(model, "simulate")'
                )
            params = QParams(scale, self._buffers["zero_point"])
        elif self.needs_calibration:
            raise CalibrationError(
                f"{self._title()} has not been calibrated; "
                "call fakequant.calibrate(model, batches), or load a checkpoint"
            )
        elif self.scales_each_call:
            given = self._buffers[GLOBAL_SCALE]
            return choose_qparams(x, self.spec) if given is None else params_under(x, self.spec, given)
        else:
            examples = self.kind is Kind.INPUT
            params = self._current(shared_by(self.spec.granularity, x.shape, examples=examples))
        groups = self.spec.granularity.group_shape(shape_of(x))
        if groups == tuple(shape_of(params.scale)):
            return params
        if params.scale.numel() == 1 == math.prod(groups):  # one scale fits tensors of any rank
            zero_point = None if params.zero_point is None else params.zero_point.reshape(groups)
            return QParams(params.scale.reshape(groups), zero_point)
        raise self._misfit(x)

    def _params_of_call(self, x: Tensor) -> tuple[QParams, QuantSpec]:
        """The parameters that `by_value` chooses for the running call, and their specification: `params_of_call`."""
        scale, by_value = self._buffers["scale"], self.by_value
        assert scale is not None
        assert by_value is not None
        return params_of_call(by_value, QParams(scale, self._buffers["zero_point"]), self.spec, x, self._title)

    def _misfit(self, x: Tensor) -> ShapeError:
        cure = "calibrate it on tensors of that shape"
        if self.kind is Kind.WEIGHT:
            cure = "the weight changed its shape since then: call fakequant.calibrate(model, pattern="
            cure += f"{self.name or '*_weight_quantizer'!r}), which needs no batches"
        return ShapeError(
            f"{self._title()} has a scale of shape {list(self._current().scale.shape)}, which does not fit "
            f"{self.spec.granularity} on a tensor of shape {list(x.shape)}; {cure}"
        )

    def _current(self, elements: int = 1) -> QParams:
        """The present scale and zero point of a calibrated quantizer; with `by_value`, of all bins."""
        if self.learned is not None:
            return self.learned.qparams(elements)
        assert self.scale is not None
        return QParams(self.scale, self.zero_point)

    def set_range(self, range: Range) -> None:
        """Set scale and zero point from a range [groups per axis]; a learned range restarts there.

        `fill_empty_groups` replaces the ranges of groups that are all zeros.
        """
        self.set_qparams(qparams_of_range(fill_empty_groups(range, self.spec), self.spec))

    def set_ranges(self, ranges: Sequence[Range], by_value: ByValue) -> None:
        """Set scale and zero point of each bin of `by_value` from the bin's range.

        Raises ConfigError unless the quantizer is of an input, static and not learned.

        >>> quantizer = fq.nn.Quantizer("int8")
        >>> ranges = [Range(torch.tensor([-1.0]), torch.tensor([hi])) for hi in (1.27, 2.54)]
        >>> quantizer.set_ranges(ranges, ByValue("timestep", [500]))
        >>> quantizer
        Quantizer(int8 per_tensor, input, scale 0.01 to 0.02 [2], by timestep in 2 bins)
        """
        if self.kind is Kind.WEIGHT or self.dynamic or self.pinned or self.learned is not None:
            raise ConfigError(
                f"{self._title()} cannot have ranges by a value, which only static quantizers of inputs can have, "
                "without a learned or prescribed range; call set_range"
            )
        found = [qparams_of_range(fill_empty_groups(range, self.spec), self.spec) for range in ranges]
        points = [own.zero_point for own in found if own.zero_point is not None]
        table = QParams(torch.stack([own.scale for own in found]), torch.stack(points) if points else None)
        self.set_qparams(table, by_value)

    def set_qparams(self, params: QParams, by_value: ByValue | None = None) -> None:
        """Set scale and zero point (with `by_value`, those of each bin); a learned range restarts there."""
        with restore_on_error(state_of([self])):
            self.release_codes()
            self._set(params)
            self.by_value = by_value

    def _set(self, params: QParams) -> None:
        """Set scale and zero point as `set_qparams` does, but keep fixed codes."""
        self.range_of_weight = self.last_weight = self.is_zero_weight = self._last_check = self._differs = None
        if self.learned is not None:
            self.learned.start(params)
            return
        with torch.inference_mode(mode=False):  # else they could neither be trained nor loaded into
            own = (params.scale, params.zero_point)
            self.scale, self.zero_point = (None if x is None else x.detach().clone() for x in own)

    def fix_global_scale(self, global_scale: Tensor) -> None:
        """Fix the global scale, float32 [1], which is 1 / the per-tensor scale; the scales of blocks stay dynamic.

        Raises ConfigError if the quantizer is not dynamic, and the QParamsErrors of `check_global_scale`.
        """
        if not self.dynamic:
            raise ConfigError(
                f"{self._title()} is not dynamic, and only dynamic quantizers have a global scale; leave this call out"
            )
        check_global_scale(global_scale, self.spec)
        self.global_scale = global_scale.detach().clone()

    def freeze(self, x: Tensor) -> None:
        """Fix scale and zero point at their values for x; `fill_empty_groups` gives ranges to groups of zeros."""
        range = library.measure(x, self.spec.granularity)
        filled = range if bool(range.amax.all()) else fill_empty_groups(range, self.spec)
        keeps = filled is range and not self.scales_each_call
        self.set_qparams(self.qparams(x) if keeps else library.choose(x, self.spec, filled))

    def reset(self) -> None:
        """Forget scale, zero point, learned range and fixed codes."""
        self._take_away_learned()
        self.release_codes()
        self.scale = self.zero_point = self.global_scale = self.range_of_weight = self.last_weight = (
            self.is_zero_weight
        ) = None
        self.by_value = None

    # Ranges that training moves.

    def learn(self, method: str = "lsq", **options: Any) -> None:
        """Let training move the range, from the present range on.

        Args:
            method: one of `fakequant.nn.learned_ranges()`: "lsq" (the step), "lsq_plus" (step and offset), "pact" (the
                clip value) or "tqt" (the logarithm of a power-of-two threshold).
            options: the options of the method, such as gradient_factor=False.

        Raises:
            ConfigError: the method or an option is unknown, the method does not support the specification, or the
                range cannot be learned, because it is dynamic, not set yet, or chosen by a value.

        >>> quantizer = Quantizer("int8")
        >>> quantizer.set_range(Range(torch.tensor([-1.27]), torch.tensor([1.0])))
        >>> quantizer.learn("lsq")
        >>> quantizer
        Quantizer(int8 per_tensor, input, scale 0.01, learned by lsq)
        >>> [name for name, _ in quantizer.named_parameters()]
        ['lsq.step']
        """
        if self.dynamic:
            raise ConfigError(
                f"{self._title()} is dynamic, so that there is no range to learn; prepare it with a static range"
            )
        if not self.calibrated:
            raise ConfigError(f"{self._title()} has no range to learn; calibrate it first")
        if self.by_value is not None:
            raise ConfigError(
                f"{self._title()} has ranges by {self.by_value.name}, which cannot be learned; keep them by "
                "Scales.FIXED, or call fakequant.calibrate without by="
            )
        with self._named_errors():
            learned = make_learned_range(method, self.spec, **options)
        if self.learned is not None and (self._method, self.learned.options()) == (method, learned.options()):
            self.learned.requires_grad_()
            return
        with torch.inference_mode(mode=False), torch.no_grad(), restore_on_error(state_of([self])):
            learned.start(self._current())
            self.attach_learned(learned)

    def attach_learned(self, learned: LearnedRange) -> None:
        """Replace the range by `learned`, whose parameters are set already, or later by a state dict."""
        self._take_away_learned()
        self.scale = self.zero_point = None
        self._method = learned.method
        self.add_module(learned.method, learned)
        join_adapters(self)  # here, because peft freezes parameters when it wraps a model

    def stop_learning(self) -> None:
        """Fix scale and zero point at the learned values; without a learned range, do nothing."""
        if self.learned is None:
            return
        with torch.no_grad(), restore_on_error(state_of([self])):
            scale, zero_point = self._current()[:2]
            self._take_away_learned()
            self._set(QParams(scale, None if zero_point is None else zero_point.to(torch.int32)))
            if self.keeps_codes:  # go on with fixed codes: the next call sets the weight to their values
                self.keeps_codes, self._weight_pending = False, True

    def _take_away_learned(self) -> None:
        self._modules.pop(self._method, None)
        self._method = ""

    # Calibration.

    def observe(self, x: Tensor) -> None:
        """Show x to the calibrator; CalibrationError with the quantizer's name if x holds NaN or inf."""
        # Not `_named_errors`: entering a context takes as long as 5,000 values, for every batch and layer.
        try:
            if self.calibrator is None:
                raise CalibrationError("is in mode OBSERVE, but has no calibrator; call fakequant.calibrate")
            self.calibrator.observe(x if type(x) is Tensor else gathered(x))
        except (CalibrationError, ConfigError, ShapeError) as error:
            raise self.named(error) from error

    def observed_range(self) -> Range:
        """The range that the calibrator computes from the tensors it has observed."""
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
        """A copy of an error whose message begins with the name of the quantizer."""
        return type(error)(f"{self.name or self}: {error}")

    # Fixed codes of a weight; quantizing the weight may give others.

    def fix_codes(self, codes: Tensor, weight: Tensor | None = None) -> None:
        """Fix the codes of a weight, and set the weight to the values of the codes with the present scale.

        Files, copies, exports and the start of training keep the codes, even if quantizing the values gives other
        codes. After a change of the weight, such as an optimizer's step, calls quantize the weight again. Codes of up
        to 8 bits take one byte each.

        Args:
            codes: codes in the shape of the weight, in the format's storage dtype, as from `fakequant.quantize`.
            weight: the parameter to set; None: the weight in the next call.

        Raises:
            ConfigError: the quantizer is of an input or learns its range, or the weight is sharded or holds no values.
            CalibrationError: the quantizer has no fixed scale.
            ShapeError: the codes have another shape than the weight, or the scale does not fit that shape.
            QParamsError: the format lacks one of the codes, or the value of a code is not finite.

        >>> weight = nn.Parameter(torch.ones(1, 3))
        >>> quantizer = fq.nn.Quantizer("int4 per_channel(0)", kind=fq.nn.Kind.WEIGHT)
        >>> quantizer.set_qparams(QParams(torch.tensor([[0.5]])))
        >>> quantizer.fix_codes(torch.tensor([[3, -8, 1]], dtype=torch.int8), weight)
        >>> quantizer(weight)
        tensor([[ 1.5000, -4.0000,  0.5000]], grad_fn=<...>)
        """
        if self.kind is not Kind.WEIGHT:
            raise ConfigError(f"{self._title()} quantizes an input; only codes of weights can be fixed")
        if self.learned is not None:
            raise ConfigError(
                f"{self._title()} learns its range, and codes need a fixed scale; call its stop_learning(), or "
                "fakequant.qat.set_scales(model, fakequant.qat.Scales.FIXED), before fix_codes"
            )
        if self.scales_each_call:
            cure = "prepare it with a static range" if self.dynamic else "call calibrate, or its set_qparams, first"
            raise CalibrationError(f"{self._title()} has no fixed scale for codes; {cure}")
        if weight is not None and (is_sharded(weight) or weight.is_meta):
            place = "sharded over processes" if is_sharded(weight) else "on the meta device, which holds no values"
            raise ConfigError(
                f"the codes of {self.name or self} cannot be fixed, because its weight is {place}; give a whole weight"
            )
        self._check_codes(codes, codes if weight is None else weight)
        exact, signed = self.spec.scale.is_exact, self.spec.has_signed_scales
        check_scale(self.qparams(codes).scale, self.spec.arithmetic, exact=exact, signed=signed, traced=False)
        with torch.no_grad():
            values = self._values(torch.float32 if weight is None else weight.dtype, codes)
            if values.numel() and not bool(torch.stack(values.aminmax()).isfinite().all()):  # without a second copy
                raise QParamsError(f"the codes of {self.name or self} times its scale give inf or NaN; check both")
            self.release_codes()
            with torch.inference_mode(mode=False):
                codes = as_integers(codes.detach())
                self.fixed_codes = codes.clone() if weight is None else codes.to(weight.device, copy=True)
        self._weight_pending = weight is None
        if weight is not None:
            self._give(weight, values)
            del values  # which the check makes anew
            self.needs_codes(weight)

    def release_codes(self) -> None:
        """Forget the fixed codes; the weight keeps its values, and calls quantize the weight again."""
        self.fixed_codes = self._last_check = self._differs = None
        self._weight_pending = self._is_trained = self.keeps_codes = False

    def keep_codes(self) -> None:
        """Keep the fixed codes while training moves the learned scale.

        Calls then do not read the weight, which gets no gradient; `give_values` sets the weight to the values of the
        codes. Raises ConfigError without fixed codes, or without a range that is learned by gradient.

        Source: the second phase of EfficientQAT, arXiv 2407.11062, section 3.3.
        """
        if self.fixed_codes is None or self.learned is None or not [*self.learned.parameters()]:
            raise ConfigError(
                f"{self._title()} has no fixed codes, or no scale that is learned by gradient; call "
                'fix_codes and then learn("lsq"), or fakequant.qat.set_scales(model, fakequant.qat.Scales.ONLY)'
            )
        self.keeps_codes, self._differs = True, None

    def give_values(self, weight: nn.Parameter) -> None:
        """Set `weight` to the values of its codes if training keeps the codes (`keep_codes`); else do nothing."""
        if self.keeps_codes:
            with torch.no_grad():
                weight.copy_(self._values(weight.dtype))

    def holds(self, weight: Tensor) -> bool:
        """Whether the codes of `weight` are fixed: it stores codes, or equals the values of `fixed_codes`.

        A conversion to half precision and back may have rounded the weight. Codes that training keeps are always fixed.
        """
        if self.keeps_codes or type(weight) is StoredWeight:
            return True
        if self._buffers[KEY] is None:
            return False
        self.needs_codes(weight)
        return self._values_in(weight) is not None

    def needs_codes(self, x: Tensor) -> bool:
        """Whether x equals the values of the fixed codes, but quantizing x would give other codes.

        A weight that training has changed loses its codes here.
        """
        return self._needed_values(x) is not None

    def codes_of_weight(self, x: Tensor) -> Tensor | None:
        """The fixed codes in the format's storage dtype, if `needs_codes(x)` or if x stores codes; else None."""
        if type(x) is StoredWeight:
            return self._of_stored(x).codes()
        return self._stored() if self.needs_codes(x) else None

    def values_of_codes(self, x: Tensor) -> Tensor | None:
        """The values of the fixed codes if `needs_codes(x)`, else None.

        Under `Gradient.CODE_RANGE` x gets the whole gradient, because no code is clipped. If training keeps the codes,
        the scale gets the gradient times (code - zero point).
        """
        if self.keeps_codes:
            return reference.dequantize(self._stored(), self.qparams(x), self.spec, x.dtype)
        if self._differs is False and not self.training:  # first: each call asks it
            return None
        if torch.compiler.is_compiling() or library.needs_tracing(x):
            return self._traced_values(x)
        values = self._needed_values(x)
        if values is None:
            return None
        if self.learned is not None:  # with the gradient of the range
            y = library.fake_quantize(x, self.qparams(x), self.trained_spec)
        elif self.spec.gradient in (Gradient.CODE_RANGE, Gradient.IDENTITY):
            y = x.clone()
        else:
            y = torch.where(reference.passes(x.detach(), self.qparams(x), self.spec), x, x.detach())
        with torch.no_grad():
            y.detach().copy_(values)
        return y

    def _of_stored(self, x: StoredWeight) -> StoredWeight:
        """Return x, a weight stored as codes; raise ConfigError if the scale has changed since x was stored."""
        own = self._buffers["scale"], self._buffers["zero_point"]
        if own[0] is x.scale or torch.compiler.is_compiling():
            return x
        if self.spec != x.spec or not all(map(is_same, own, (x.scale, x.zero_point))):
            raise ConfigError(
                f"the scale of {self.name or self} was set anew, but the codes of its weight are stored; call "
                "fakequant.store_floats(model) before the scale changes"
            )
        return x

    def _needed_values(self, x: Tensor) -> Tensor | None:
        """The values of the fixed codes if `needs_codes(x)`, else None."""
        if self.keeps_codes:
            return self._values(x.dtype)
        if self._buffers[KEY] is None or type(x) is StoredWeight:
            return None
        if self._weight_pending:
            if type(x) is not nn.Parameter or x.is_meta:
                raise ConfigError(
                    f"the quantizer {self.name or self} has fixed codes, but its weight is computed, sharded or on "
                    "the meta device, and cannot take them; make the weight a parameter first, as by prune.remove or "
                    "remove_parametrizations, or call release_codes() on the quantizer"
                )
            self._check_codes(self._stored(), x)
            self._give(x, self._values(x.dtype))
        key = self._key(x)
        if key is not None and self._last_check == (key, False):  # quantizing is right for any other weight, too
            return None
        values = self._values_in(x)
        trains = self.training and torch.is_grad_enabled() and x.requires_grad
        if values is None:
            if trains and type(x) is nn.Parameter:
                self.release_codes()
                return None
            if not (trains or self._is_trained) and self._fits(x):
                if self._differs is None:  # else codes of unchanged values stay
                    self._differs = self._differs_requantized(self._values(x.dtype))
                if self._differs:
                    warn_user(  # without the name of the layer: it is one line for all layers of a model
                        "weights changed since their codes were fixed: all codes of such a weight are computed "
                        "anew, which may also change codes of values that stayed; restore the weight, or fix its "
                        "codes anew by Quantizer.fix_codes",
                        StaleScaleWarning,
                    )
        elif key is None or self._last_check != (key, True):
            self._differs = self._differs_requantized(x)
        self._is_trained |= trains
        needed = values is not None and self._differs is True
        self._last_check = None if key is None else (key, needed)
        return values if needed else None

    def _values_in(self, x: Tensor) -> Tensor | None:
        """The values of the fixed codes in the dtype of x, if x equals them, also as rounded to 16 bits; else None."""
        if not self._fits(x):
            return None
        with torch.no_grad():
            values = self._values(x.dtype)
            stands = are_equal(values, x) or any(are_equal(own, x) for own in self._converted(x.dtype))
            return values if stands else None

    def _converted(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The values of the fixed codes, converted to each dtype in `_CONVERTED` and then to `dtype`."""
        exact = self._values(torch.float32)
        return (exact.to(own).to(dtype) for own in _CONVERTED)

    @torch.no_grad()
    def _differs_requantized(self, x: Tensor) -> bool:
        """Whether quantizing x gives codes other than the fixed codes."""
        if self.spec.rounding is Rounding.STOCHASTIC:
            return True
        codes = library.encode(x, self._params(x), self.spec)
        return codes is None or not torch.equal(as_integers(codes), as_integers(self._stored()))

    def _traced_values(self, x: Tensor) -> Tensor | None:
        """`_needed_values` in a trace, whose graph compares x in each call; None if quantizing gives these codes."""
        codes = self.fixed_codes
        if codes is None:
            return None
        if self._differs is None and not (torch.compiler.is_compiling() or library.needs_tracing(gathered(codes))):
            self._differs = self._differs_requantized(self._values(x.dtype))
        if self._differs is False:
            return None
        if self._weight_pending:
            raise ConfigError(
                f"the quantizer {self.name or self} has fixed codes that are not in its weight yet; call the model "
                "once, or give the weight to fix_codes, before the model is compiled or transformed"
            )
        if is_sharded(x):
            raise ConfigError(
                f"the codes of {self.name or self} are fixed, but its weight is sharded over processes, and quantizing "
                "it in a compiled model or transform may give other codes; call the model once before you compile it, "
                "which shows whether codes differ, call release_codes() on the quantizer, or do not shard this layer"
            )
        if not self._fits(x):
            return None
        values = self._values(x.dtype)
        stands = (values == x).all()
        for own in self._converted(x.dtype):
            stands = stands | (own == x).all()
        fixed = torch.where(values == x, x, values + (x - x.detach()))  # with the gradient of x, to the bit
        return torch.where(stands, fixed, library.fake_quantize(x, self.qparams(x), self.trained_spec))

    def _check_codes(self, codes: Tensor, weight: Tensor) -> None:
        try:
            check_codes(codes, tuple(weight.shape), self.spec.format)
        except (ShapeError, QParamsError) as error:
            raise type(error)(f"the codes of {self.name or self} {error}") from error

    def _give(self, weight: Tensor, values: Tensor) -> None:
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            separate([weight])
            weight.copy_(values)
        self._weight_pending, self.last_weight, self.range_of_weight = False, None, magnitudes(self.spec, weight)

    def _stored(self) -> Tensor:
        assert self.fixed_codes is not None, "called where codes are fixed"
        return of_integers(gathered(self.fixed_codes), self.spec.format)  # tensor parallelism shards buffers, too

    def _values(self, dtype: torch.dtype, codes: Tensor | None = None) -> Tensor:
        codes = self._stored() if codes is None else codes
        return library.dequantize(codes, self._params(codes), self.spec, dtype)

    def _params(self, x: Tensor) -> QParams:
        scale, zero_point = (None if own is None else gathered(own.detach()) for own in self.qparams(x)[:2])
        assert scale is not None, "the range is calibrated"
        if zero_point is not None and self.learned is not None:  # whose zero points are floats
            zero_point = zero_point.to(torch.int32)
        return QParams(scale, zero_point)

    def _fits(self, x: Tensor) -> bool:
        """Whether there is a scale, and fixed codes in the shape of x and the format's integer dtype."""
        codes = self.fixed_codes
        if codes is None or codes.is_meta or x.is_meta or is_sharded(x) or self.scales_each_call:
            return False
        return codes.shape == x.shape and codes.dtype is integers_of(self.spec.format)

    def _key(self, x: Tensor) -> Any:
        """A value that differs after nearly every change of x, its codes or its scale; None unless x is a parameter."""
        codes, scale = self.fixed_codes, self.scale
        if type(x) is not nn.Parameter or x.is_inference() or codes is None or scale is None:
            return None
        return weight_version(x), x.dtype, self.spec, version_of(codes), version_of(scale)

    # Methods of torch's modules.

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers.setdefault(KEY, None)  # of a model that an earlier version pickled

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        super()._apply(fn, recurse)
        self._last_check = self._differs = None
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        join_adapters(self)  # here, because peft asks for the state of the model before it looks for what to save
        noted = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        noted |= {"fitted_to": self.range_of_weight, "spec": self._numbers(), "keeps_codes": self.keeps_codes}
        if self._weight_pending:
            noted["awaits_weight"] = True
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a fixed range, or a learned range with the method that the keys name.

        Without codes in the state, the present codes stay, which are valid if the weight equals their values. The
        state's metadata says whether training keeps codes (`keep_codes`); without metadata this stays as it is. A
        quantizer with a range for each bin reports an error if the state has one range or other bins.
        """
        if state_dict.pop(prefix + MERGED, None) is not None and not vars(self).get(MERGED):
            warn_user(
                "the adapter was trained as merged into the weight (by QATCallback, Training or train_merged), but "
                "here it is added to the layer's output, which gives other results; call "
                "fakequant.integrations.peft.train_merged(model)",
                StaleScaleWarning,
            )
        methods = {key.removeprefix(prefix).split(".")[0] for key in state_dict if key.startswith(prefix)}
        stated = sorted(methods & set(learned_ranges()))
        if stated and stated[0] != self._method:
            self.attach_learned(make_learned_range(stated[0], self.spec))
        elif prefix + "scale" in state_dict:
            self._take_away_learned()
        if methods & {"scale", *stated}:
            self.range_of_weight, self.last_weight = local_metadata.get("fitted_to"), None
            if (other := local_metadata.get("spec", self._numbers())) != self._numbers():
                error_msgs.append(
                    f"{prefix.removesuffix('.')} is {self._numbers()}, and its state is of {other}: prepare the model "
                    "with the configuration of the state"
                )
        keeps = local_metadata.get("keeps_codes", self.keeps_codes)
        key, wanted = prefix + KEY, integers_of(self.spec.format)
        codes = state_dict.get(key)
        if codes is not None and codes.dtype is not wanted:
            error_msgs.append(f"{key} is {codes.dtype}, but the codes of {self.spec.format} are stored as {wanted}.")
            state_dict = {other: value for other, value in state_dict.items() if other != key}
        elif codes is not None:
            self.release_codes()
            self._weight_pending = local_metadata.get("awaits_weight", False)
        if key not in state_dict and self.fixed_codes is not None:
            state_dict = {**state_dict, key: self.fixed_codes}
        scale, by_value = state_dict.get(prefix + "scale"), self.by_value
        if by_value is not None and scale is not None and not (scale.dim() > 1 and len(scale) == by_value.count):
            error_msgs.append(
                f"{self._title()} has ranges by {by_value.name} in {by_value.count} bins, and {prefix}scale is "
                f"{list(scale.shape)}; load it into a model that was calibrated in the same way"
            )
        else:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        self.keeps_codes = keeps and self.learned is not None and self.fixed_codes is not None

    def _numbers(self) -> str:
        """The specification as text, without gradient and rounding, which do not change the scale."""
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
            scale = self._current().scale.detach()
            if not is_concrete(scale):  # of an exporter or a transform: `torch.vmap` asks for the name of its function
                words.append("calibrated")
            else:
                lowest, highest = scale.min().item(), scale.max().item()
                many = f" to {highest:.4g} [{scale.numel()}]" if scale.numel() > 1 else ""
                words += [f"scale {lowest:.4g}{many}", *self.by_value_text()]
                words += [f"learned by {self._method}"] if self.learned is not None else []
        if self.fixed_codes is not None:
            words.append("fixed codes")
        return f"Quantizer({', '.join(words)})"

    def by_value_text(self) -> list[str]:
        """The part of `repr` about `by_value`, as a list of one text; [] without it."""
        return [] if self.by_value is None else [f"by {self.by_value.name} in {self.by_value.count} bins"]


def quantizers(model: nn.Module) -> dict[str, Quantizer]:
    """All quantizers of a model by their path in it."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
