"""Codes that a solver or a reader fixed for a weight; quantizing the weight may give others.

`Quantizer.fix_codes` sets a weight to the values of the codes. The codes are valid while the weight has these values,
bit for bit. If quantizing the values gives the same codes, calls quantize as usual, at no cost. Otherwise each call
compares the weight with the values.

Whether the parameters of a quantizer still fit the weight for which they were set.

Codes of a weight that stay while training moves the scale under them.

Source: the second phase of EfficientQAT, arXiv 2407.11062, section 3.3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fakequant.distributed import is_sharded, whole
from fakequant.errors import CalibrationError, ConfigError, QParamsError, ShapeError, StaleScaleWarning, warn_user
from fakequant.nn.leaf import Proxy, as_leaf
from fakequant.nn.ranges.by_value import Kind
from fakequant.nn.ranges.learned import QuantizerPart
from fakequant.nn.stored.weight import StoredWeight
from fakequant.numerics import reference
from fakequant.numerics.formats.floats import as_integers, check_codes, integers_of, of_integers
from fakequant.numerics.qparams import QParams, check_scale
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding
from fakequant.ops import library

_TOLERATED = 0.1
"""Relative change of a group's largest magnitude. Fine-tuning at 1 % of the learning rate moves less."""


class _Fitted(Protocol):
    """The part of a `Quantizer` that is read here."""

    spec: QuantSpec
    fitted_to: Tensor | None
    seen: Any
    training: bool

    @property
    def learned(self) -> object | None: ...


def look(quantizer: _Fitted, weight: Tensor) -> None:
    """Note the weight of a call, or warn in eval mode, once after each change, that its scales do not fit.

    An unchanged parameter costs 1 us. A computed weight is another tensor in every call: it is looked at in the first
    call after those in training mode. Sharded weights are not looked at: that takes all processes.
    """
    if torch.compiler.is_compiling():
        return
    if quantizer.training and quantizer.fitted_to is not None:
        quantizer.seen = None
        return
    if (seen := mark(weight)) == quantizer.seen:
        return
    if is_sharded(weight) or library.needs_tracing(weight):
        return
    quantizer.seen = seen
    if quantizer.fitted_to is None:
        quantizer.fitted_to = magnitudes(quantizer.spec, weight)
    elif is_stale(quantizer, weight):
        warn_user(  # without the name of the layer: it is one line for all layers of a model
            "weights changed by more than 10 % since the scales of their quantizers were set, and are clipped or "
            "quantized too coarsely now; fakequant.summary(model) names them and what sets the scales anew",
            StaleScaleWarning,
        )


def is_stale(quantizer: _Fitted, weight: Tensor) -> bool:
    """Whether a group's largest magnitude is not nearly the one for which the parameters were set.

    A learned scale and the weight that trains with it always fit. A frozen weight changes by other means alone.
    """
    before = quantizer.fitted_to
    if before is None or (quantizer.learned is not None and weight.requires_grad):
        return False
    if quantizer.spec.granularity.group_shape(weight.shape) != before.shape:
        return True
    now, before = magnitudes(quantizer.spec, weight).double(), before.to(weight.device).double()
    return bool(((now - before).abs() > _TOLERATED * before).any())


def magnitudes(spec: QuantSpec, weight: Tensor) -> Tensor:
    """The largest magnitude of every group, in the dtype of the weight, whose values they are: no more memory."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return library.measure(weight.detach(), spec.granularity).amax.to(weight.dtype)


def mark(weight: Tensor) -> Any:
    """A value that differs after nearly every change of a parameter: torch counts those that do not go through `data`.

    peft merges adapters through `data`, so that the first element is looked at, too, where that waits for no device.
    """
    if type(weight) is not nn.Parameter or weight.is_inference():
        return type(weight)
    place = weight.data_ptr()  # 0 of an empty or a meta tensor
    first = ctypes.string_at(place, weight.element_size()) if place and weight.is_cpu else b""
    return weight._version, place, first


KEY = "fixed_codes"
"""The name of the buffer, and the last part of its key in a state dict."""
UNUSUAL = (Proxy, StoredWeight)
"""What quantizers are called with beside tensors of numbers."""
_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes to which a model with fixed codes may have been converted for a while."""


class FixedCodes(QuantizerPart):
    """The part of a quantizer that holds fixed codes of its weight.

    `fixed_codes` is a buffer: None, or the codes as integers in the shape of the weight.
    """

    name: str
    spec: QuantSpec
    kind: Kind
    dynamic: bool
    scale: Tensor | None
    fixed_codes: Tensor | None
    fitted_to: Tensor | None = None
    """The largest magnitude per group of the weight for which the parameters were set; see `fitted.py`."""
    seen: Any = None
    """The weight of the last call in eval mode, as `fitted.look` compares it."""
    _awaits_weight = False
    """Whether the next call sets its weight to the values of the codes."""
    _is_trained = False
    """Whether the codes stood in a call of training."""
    _judged: tuple[Any, bool] | None = None
    """The last weight, by `_key`, and whether quantizing it would not give its fixed codes."""
    _others: bool | None = None
    """Whether quantizing the values of the codes, in the dtype of the last weight, gives others; None: not known."""

    if TYPE_CHECKING:

        @property
        def calibrated(self) -> bool: ...

        @property
        def learned(self) -> object | None: ...

        @property
        def trained_spec(self) -> QuantSpec: ...

        def qparams(self, x: Tensor) -> QParams: ...

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(KEY, None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers.setdefault(KEY, None)  # of a model that an earlier version pickled

    def fix_codes(self, codes: Tensor, weight: Tensor | None = None) -> None:
        """Fix the codes of a weight, and set the weight to their values with the present scale.

        The codes are state: files, copies, exports and the start of training keep them, even if quantizing the values
        gives other codes. They are valid while the weight has their values. After a change of the weight, such as an
        optimizer's step, it is quantized again. They need a byte for each value in formats of up to 8 bits.

        Args:
            codes: in the shape of the weight and the storage of the format, as `fakequant.quantize` gives them.
            weight: the parameter; without it, the one of the next call.

        Raises:
            ConfigError: a quantizer of an input, a learned range, or a weight that is sharded or holds no values.
            CalibrationError: no fixed scale.
            ShapeError: codes of another shape than the weight, or a scale that does not fit them.
            QParamsError: codes that the format does not have, or values that are not finite.

        >>> weight = nn.Parameter(torch.ones(1, 3))
        >>> quantizer = fq.nn.Quantizer("int4 per_channel(0)", kind=fq.nn.Kind.WEIGHT)
        >>> quantizer.set_qparams(QParams(torch.tensor([[0.5]])))
        >>> quantizer.fix_codes(torch.tensor([[3, -8, 1]], dtype=torch.int8), weight)
        >>> quantizer(weight)
        tensor([[ 1.5000, -4.0000,  0.5000]], grad_fn=<...>)
        """
        self._check_can_fix(weight)
        self._check(codes, codes if weight is None else weight)
        check_scale(self.qparams(codes).scale, self.spec.arithmetic, exact=self.spec.scale.is_exact, traced=False)
        with torch.no_grad():
            values = self._values(torch.float32 if weight is None else weight.dtype, codes)
            if not bool(values.isfinite().all()):
                raise QParamsError(f"the codes of {self.name or self} stand for values that are not finite")
            self.release_codes()
            with torch.inference_mode(mode=False):
                codes = as_integers(codes.detach())
                self.fixed_codes = codes.clone() if weight is None else codes.to(weight.device, copy=True)
        self._awaits_weight = weight is None
        if weight is not None:
            self._give(weight, values)

    def release_codes(self) -> None:
        """Forget fixed codes; from now on the weight is quantized. Its values do not change."""
        self.fixed_codes = self._judged = self._others = None
        self._awaits_weight = self._is_trained = False

    def holds(self, weight: Tensor) -> bool:
        """Whether fixed codes are valid for a weight: it has their values, up to the rounding of conversions to other
        dtypes, or stores them."""
        if type(weight) is StoredWeight:
            return True
        if self._buffers[KEY] is None:
            return False
        self.needs_codes(weight)
        return self._values_in(weight) is not None

    def needs_codes(self, x: Tensor) -> bool:
        """Whether fixed codes are valid for x, and quantizing x gives others.

        A weight that training has changed loses its codes here.
        """
        return self._needed_values(x) is not None

    def codes_of_weight(self, x: Tensor) -> Tensor | None:
        """The fixed codes in the storage of the format if x `needs_codes`, or stores them, else None."""
        if type(x) is StoredWeight:
            return self.of_stored(x).codes()
        return self._stored() if self.needs_codes(x) else None

    def values_of_codes(self, x: Tensor) -> Tensor | None:
        """The values of the fixed codes if x `needs_codes`; None if x is quantized as usual.

        Codes are in the range of their format, so that the gradient passes.
        """
        if self._others is False and not self.training:  # first, because it is asked at every call
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

    def of_unusual(self, x: Any) -> Any:
        """What a call gives for what is no tensor of numbers."""
        if isinstance(x, Proxy):
            return as_leaf(self, x)
        return self.of_stored(x) if self.kind is Kind.WEIGHT else self(x.values())

    def of_stored(self, x: StoredWeight) -> StoredWeight:
        """The values of a weight that is stored as codes, whose scale this quantizer has.

        Raises:
            ConfigError: the scale has changed since the codes were stored.
        """
        own = self._buffers["scale"], self._buffers["zero_point"]
        if own[0] is x.scale or torch.compiler.is_compiling():
            return x
        if self.spec != x.spec or not all(map(is_same, own, (x.scale, x.zero_point))):
            raise ConfigError(
                f"the scale of {self.name or self} was set anew, but the codes of its weight are stored; call "
                "fakequant.store_floats(model) before that"
            )
        return x

    def quantized(self, x: Tensor) -> Tensor:
        """What the next call gives for x, without a look at whether the parameters still fit."""
        if type(x) is StoredWeight:
            return self.of_stored(x)
        values = self.values_of_codes(x)
        return library.fake_quantize(x, self.qparams(x), self.spec) if values is None else values

    def _needed_values(self, x: Tensor) -> Tensor | None:
        """The values of the codes if x `needs_codes`, else None."""
        if self._buffers[KEY] is None or type(x) is StoredWeight:
            return None
        if self._awaits_weight:
            self._take(x)
        key = self._key(x)
        if key is not None and self._judged == (key, False):  # quantizing is right for any other weight, too
            return None
        values = self._values_in(x)
        trains = self.training and torch.is_grad_enabled() and x.requires_grad
        if values is None:
            if trains and type(x) is nn.Parameter:
                self.release_codes()
                return None
            if not (trains or self._is_trained) and self._fits(x):
                self._warn_of_change(x)
        elif key is None or self._judged != (key, True):
            self._others = self._gives_others(x)
        self._is_trained |= trains
        needed = values is not None and self._others is True
        self._judged = None if key is None else (key, needed)
        return values if needed else None

    def _values_in(self, x: Tensor) -> Tensor | None:
        """The values of the codes in the dtype of x if x has them, before or after a conversion; else None."""
        if not self._fits(x):
            return None
        with torch.no_grad():
            values = self._values(x.dtype)
            stands = _equal(values, x) or any(_equal(own, x) for own in self._converted(x.dtype))
            return values if stands else None

    def _converted(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The values of the codes after a conversion to other dtypes, and then to this one."""
        exact = self._values(torch.float32)
        return (exact.to(own).to(dtype) for own in _CONVERTED)

    @torch.no_grad()
    def _gives_others(self, x: Tensor) -> bool:
        """Whether quantizing x gives other codes than those that are fixed."""
        if self.spec.rounding is Rounding.STOCHASTIC:
            return True
        codes = library.encode(x, self._params(x), self.spec)
        return codes is None or not torch.equal(as_integers(codes), as_integers(self._stored()))

    def _warn_of_change(self, x: Tensor) -> None:
        """Warn that codes of unchanged values may change, too."""
        if self._others is None:
            self._others = self._gives_others(self._values(x.dtype))
        if self._others:
            warn_user(  # without the name of the layer: it is one line for all layers of a model
                "weights changed since their codes were fixed: all codes of such a weight are made from it again, "
                "which changes codes beside those of the changed values, too; restore the weight, or fix its codes "
                "anew by Quantizer.fix_codes",
                StaleScaleWarning,
            )

    def _traced_values(self, x: Tensor) -> Tensor | None:
        """`_needed_values` for tracing: torch operations compare at each call; None if quantizing gives the codes."""
        codes = self.fixed_codes
        if codes is None:
            return None
        if self._others is None and not (torch.compiler.is_compiling() or library.needs_tracing(whole(codes))):
            self._others = self._gives_others(self._values(x.dtype))
        if self._others is False:
            return None
        if self._awaits_weight:
            raise ConfigError(
                f"the codes of {self.name or self} were fixed without their weight; call the model once, or give the "
                "weight to fix_codes, before it is compiled or transformed"
            )
        if is_sharded(x):
            raise ConfigError(
                f"the codes of {self.name or self} are fixed, and quantizing its weight, which is sharded over "
                "processes, may give others; call release_codes() on the quantizer, or shard no weight of this layer. "
                "In a model that is compiled, call it once before, so that what quantizing gives is known"
            )
        if not self._fits(x):
            return None
        values = self._values(x.dtype)
        stands = (values == x).all()
        for own in self._converted(x.dtype):
            stands = stands | (own == x).all()
        fixed = torch.where(values == x, x, values + (x - x.detach()))  # with the gradient of x, to the bit
        return torch.where(stands, fixed, library.fake_quantize(x, self.qparams(x), self.trained_spec))

    def _check_can_fix(self, weight: Tensor | None) -> None:
        name = self.name or self
        if self.kind is not Kind.WEIGHT:
            raise ConfigError(f"the quantizer {name} is that of an input, and codes are fixed for weights")
        if self.learned is not None:
            raise ConfigError(
                f"the quantizer {name} learns its range, and codes need a fixed scale; call its stop_learning(), or "
                "fakequant.qat.set_scales(model, fakequant.qat.Scales.FIXED), before fix_codes"
            )
        if self.dynamic or not self.calibrated:
            cure = "prepare it with a static range" if self.dynamic else "call calibrate, or its set_qparams, first"
            raise CalibrationError(f"the quantizer {name} has no fixed scale for codes; {cure}")
        if weight is not None and (is_sharded(weight) or weight.is_meta):
            place = "sharded over processes" if is_sharded(weight) else "on the meta device, which holds no values"
            raise ConfigError(f"the codes of {name} cannot be fixed, because its weight is {place}")

    def _check(self, codes: Tensor, weight: Tensor) -> None:
        try:
            check_codes(codes, tuple(weight.shape), self.spec.format)
        except (ShapeError, QParamsError) as error:
            raise type(error)(f"the codes of {self.name or self} {error}") from error

    def _take(self, x: Tensor) -> None:
        """Set the weight of a call to the values of codes that were fixed without a weight."""
        if type(x) is not nn.Parameter or x.is_meta:
            raise ConfigError(
                f"the codes of {self.name or self} were fixed, but its weight is computed, sharded or without values; "
                "make it a parameter first, as by prune.remove or remove_parametrizations, or call release_codes() on "
                "the quantizer"
            )
        self._check(self._stored(), x)
        self._give(x, self._values(x.dtype))

    def _give(self, weight: Tensor, values: Tensor) -> None:
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            weight.copy_(values)
        self._awaits_weight, self.seen, self.fitted_to = False, None, magnitudes(self.spec, weight)
        self.needs_codes(weight)

    def _stored(self) -> Tensor:
        assert self.fixed_codes is not None, "called where codes are fixed"
        return of_integers(whole(self.fixed_codes), self.spec.format)  # tensor parallelism shards buffers, too

    def _values(self, dtype: torch.dtype, codes: Tensor | None = None) -> Tensor:
        codes = self._stored() if codes is None else codes
        return library.dequantize(codes, self._params(codes), self.spec, dtype)

    def _params(self, x: Tensor) -> QParams:
        scale, zero_point = (None if own is None else whole(own.detach()) for own in self.qparams(x)[:2])
        assert scale is not None, "the range is calibrated"
        if zero_point is not None and self.learned is not None:  # whose zero points are floats
            zero_point = zero_point.to(torch.int32)
        return QParams(scale, zero_point)

    def _fits(self, x: Tensor) -> bool:
        """Whether there are codes and a scale that fit x."""
        codes = self.fixed_codes
        if codes is None or codes.is_meta or x.is_meta or is_sharded(x) or self.dynamic or not self.calibrated:
            return False
        return codes.shape == x.shape and codes.dtype is integers_of(self.spec.format)

    def _key(self, x: Tensor) -> Any:
        """A value that differs after nearly every change of a parameter, its codes or scale; None for other tensors."""
        codes, scale = self.fixed_codes, self.scale
        if type(x) is not nn.Parameter or x.is_inference() or codes is None or scale is None:
            return None
        return mark(x), x.dtype, self.spec, _version(codes), _version(scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedCodes:
        super()._apply(fn, recurse)
        self._judged = self._others = None
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._awaits_weight:
            getattr(destination, "_metadata", {}).get(prefix[:-1], {})["awaits_weight"] = True
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load codes; a state without codes keeps the present ones, which are valid if the weight has their values."""
        given, wanted = state_dict.get(prefix + KEY), integers_of(self.spec.format)
        if given is not None and given.dtype is not wanted:
            args[-1].append(
                f"{prefix}{KEY} is {given.dtype}, but the codes of {self.spec.format} are stored as {wanted}."
            )
            state_dict = {key: value for key, value in state_dict.items() if key != prefix + KEY}
        elif given is not None:
            self.release_codes()
            self._awaits_weight = args[0].get("awaits_weight", False)
        if prefix + KEY not in state_dict and self.fixed_codes is not None:
            state_dict = {**state_dict, prefix + KEY: self.fixed_codes}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _equal(one: Tensor, other: Tensor) -> bool:
    """`torch.equal` for one shape and dtype, on bits as int64: in float16 it takes 8 times as long."""
    plain = one.is_contiguous() and other.is_contiguous() and one.numel() * one.element_size() % 8 == 0
    same_bits = plain and torch.equal(*(own.detach().view(-1).view(torch.int64) for own in (one, other)))
    return same_bits or torch.equal(one, other)  # -0.0 is 0.0, which a step of 0 may make of it


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two parameters of quantizers are equal in all values, or one object."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _version(tensor: Tensor) -> tuple[int, int | None]:
    return id(tensor), None if tensor.is_inference() else tensor._version


class KeptCodes(FixedCodes):
    """The part of a quantizer whose weight is its fixed codes times a scale that is learned.

    The weight itself is not read and gets no gradient. It has the values of its codes again after `give_values`.
    """

    keeps_codes = False
    """Whether the codes stay while the scale is learned; `stop_learning` ends it."""

    def keep_codes(self) -> None:
        """Let the fixed codes stay whatever training does to the learned scale.

        Raises:
            ConfigError: no fixed codes, or no range that is learned by gradient.
        """
        learned = self.learned
        if self.fixed_codes is None or not (isinstance(learned, nn.Module) and [*learned.parameters()]):
            raise ConfigError(
                f"the quantizer {self.name or self} has no codes that could stay, or no scale that is learned by "
                'gradient; call fix_codes and then learn("lsq"), or fakequant.qat.set_scales(model, '
                "fakequant.qat.Scales.ONLY)"
            )
        self.keeps_codes, self._others = True, None

    def release_codes(self) -> None:
        """Forget fixed codes; from now on the weight is quantized. Its values do not change."""
        super().release_codes()
        self.keeps_codes = False

    def holds(self, weight: Tensor) -> bool:
        """As of fixed codes; those that stay are always valid."""
        return self.keeps_codes or super().holds(weight)

    def values_of_codes(self, x: Tensor) -> Tensor | None:
        """As of fixed codes; those that stay give the scale its gradient: the code less the zero point."""
        if not self.keeps_codes:
            return super().values_of_codes(x)
        return reference.dequantize(self._stored(), self.qparams(x), self.spec, x.dtype)

    def give_values(self, weight: nn.Parameter) -> None:
        """Set a weight whose codes stay to their values with the scale as it is now."""
        if self.keeps_codes:
            with torch.no_grad():
                weight.copy_(self._values(weight.dtype))

    def _needed_values(self, x: Tensor) -> Tensor | None:
        return self._values(x.dtype) if self.keeps_codes else super()._needed_values(x)

    def _stop_keeping(self) -> None:
        """Go on with fixed codes and a fixed scale: the next call sets the weight to the values."""
        if self.keeps_codes:
            self.keeps_codes, self._awaits_weight = False, True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        getattr(destination, "_metadata", {}).get(prefix[:-1], {})["keeps_codes"] = self.keeps_codes
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Go on keeping the codes of a state where its metadata, or without metadata this quantizer, says so."""
        keeps = args[0].get("keeps_codes", self.keeps_codes)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.keeps_codes = keeps and self.learned is not None and self.fixed_codes is not None
