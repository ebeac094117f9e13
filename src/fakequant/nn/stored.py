"""A weight stored as packed codes and scales: a tensor that decodes its values for each operation."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fakequant.errors import ConfigError
from fakequant.numerics import reference
from fakequant.numerics.formats.floats import Format, as_integers, integers_of, lowest_of, of_integers
from fakequant.numerics.formats.packing import pack, unpack_bytes
from fakequant.numerics.qparams import QParams, compute_dtype, is_concrete
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

CODES = "_codes"
"""The suffix of a weight's name in the key of its packed codes in a state dict."""
SPEC = "_codes_spec"
"""The suffix in the key of the codes' specification: bytes of its text, because files store only tensors."""
_PACKED = 8
"""The largest width in bits of codes that are packed; wider codes are stored unpacked."""
_CHUNK = 1 << 19
"""How many values are decoded at once, so that all steps stay in the cache of a core."""
_ROOM = 1 << 28
"""The largest weight in bytes that products decode into a reused buffer: fresh memory costs 2 ns a value for the
system's zeros, while decoding costs 0.8 and a product with 128 rows 3.3."""
_aten: Any = torch.ops.aten
_VIEWS = frozenset(
    [
        *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default, _aten._unsafe_view.default),
        *(_aten.select.int, _aten.slice.Tensor, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default),
        *(_aten.detach.default, _aten.alias.default),
    ]
)
_PRODUCTS = frozenset(
    [_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.linear.default]
)
"""Operations whose results share no memory with their arguments, so that the next product may reuse the buffer."""
_WRITTEN = (
    "a weight that is stored as codes cannot be changed ({}); call fakequant.store_floats(model) first, or for "
    "adapters of peft train_merged, which merges into codes"
)
View = tuple[Any, tuple[Any, ...]]


class StoredWeight(Tensor):
    """A frozen weight as scales and codes, packed along its last axis; every operation decodes the values anew.

    Autograd keeps this tensor, and not the values, for the backward pass. Writing to it raises ConfigError. `nbytes`
    counts the float values; the tensor holds only `packed`, scale and zero point.

    Args:
        packed: uint8 [..., bytes]; codes of more than 8 bits are not packed.
        params: scales and zero points, one for each group in a shape that broadcasts with the weight.
        spec: the specification of the codes.
        shape: the shape of the weight.
        dtype: the dtype of the values.
        views: view operations, such as a transpose, which turn the weight into this tensor.

    >>> codes, params = quantize(torch.tensor([[0.5, -1.0]]), "int4", scale=0.5)
    >>> weight = StoredWeight.of(codes, params, QuantSpec("int4"), torch.float32)
    >>> weight.packed, (weight.T @ torch.ones(1)).tolist()
    (tensor([[105]], dtype=torch.uint8), [0.5, -1.0])
    """

    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None
    spec: QuantSpec
    whole_shape: tuple[int, ...]
    views: tuple[View, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(
        cls: Any,
        packed: Tensor,
        params: QParams,
        spec: QuantSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        views: tuple[View, ...] = (),
    ) -> StoredWeight:
        like = _viewed(torch.empty(shape, dtype=dtype, device="meta"), views)
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=dtype,
            device=packed.device,
            requires_grad=False,
        )
        made.packed, made.scale, made.zero_point = packed, params.scale, params.zero_point
        made.spec, made.whole_shape, made.views = spec, tuple(shape), views
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @classmethod
    def of(cls, codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> StoredWeight:
        """A stored weight from codes in the format's storage dtype; scale and zero point broadcast with the codes."""
        return cls(_pack(codes, spec.format), params, spec, tuple(codes.shape), dtype)

    @classmethod
    def quantized(cls, weight: Tensor, params: QParams, spec: QuantSpec) -> StoredWeight:
        """A stored weight from float values, which hold no NaN; they are quantized in parts, to need little memory."""
        shape, fmt = tuple(weight.shape), spec.format
        is_packed = fmt.bits <= _PACKED and bool(shape)
        stored = (*shape[:-1], -(-shape[-1] * fmt.bits // 8)) if is_packed else shape
        packed = torch.empty(stored, dtype=torch.uint8 if is_packed else integers_of(fmt), device=weight.device)
        made = cls(packed, params, spec, shape, weight.dtype)
        step = made._rows_at_once()
        for start in range(0, shape[0] if shape else 1, step):
            part = slice(start, start + step) if shape else ...
            codes = library.encode(weight[part], made._params(part), spec)
            assert codes is not None, "it would hold NaN"
            packed[part] = _pack(codes, fmt)
        return made

    def codes(self) -> Tensor:
        """The codes of the whole weight, without `views`, in the format's storage dtype."""
        return _unpack(self.packed, self.spec.format, self.whole_shape)

    def values(self, *, lent: bool = False) -> Tensor:
        """The float values [shape of this tensor].

        With `lent` they may be in a buffer of the thread, which the next call with `lent` overwrites.
        """
        shape, dtype, device = self.whole_shape, self.dtype, self.packed.device
        step = self._rows_at_once()
        if not shape or step >= shape[0] or torch.compiler.is_compiling():
            return _viewed(self._decoded(self.packed, self._params(), shape), self.views)
        lent = lent and device.type == "cpu" and is_concrete(self.packed)
        values = _room.of(shape, dtype) if lent else torch.empty(shape, dtype=dtype, device=device)
        for start in range(0, shape[0], step):
            part = slice(start, min(start + step, shape[0]))
            own = (part.stop - start, *shape[1:])
            values[part] = self._decoded(self.packed[part], self._params(part), own)
        return _viewed(values, self.views)

    def rows(self, indices: Tensor) -> Tensor:
        """The values at indices of the first axis [shape of the indices, ...]; only these rows are decoded."""
        flat, (length, *rest) = indices.flatten(), self.whole_shape
        if self.views or self.scale.shape[0] not in (1, length):
            return self.values()[indices]
        params = QParams(self.scale, self.zero_point)
        if self.scale.shape[0] == length:
            params = QParams(self.scale[flat], None if self.zero_point is None else self.zero_point[flat])
        decoded = self._decoded(self.packed[flat], params, (len(flat), *rest))
        return decoded.unflatten(0, indices.shape) if indices.dim() != 1 else decoded

    def with_parts(self, packed: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> StoredWeight:
        """A weight with the codes `packed`, and with `scale` and `zero_point` unless they are None.

        Raises ConfigError if a tensor has another shape or dtype than the tensor that it replaces.
        """
        given = packed, self.scale if scale is None else scale, self.zero_point if zero_point is None else zero_point
        for own, new in zip((self.packed, self.scale, self.zero_point), given, strict=True):
            if own is not None and new is not None and (own.shape, own.dtype) != (new.shape, new.dtype):
                raise ConfigError(
                    f"a tensor of {new.dtype} {list(new.shape)} cannot replace one of {own.dtype} {list(own.shape)} in "
                    f"{self}; give one of the same shape and dtype"
                )
        return type(self)(packed, QParams(*given[1:]), self.spec, self.whole_shape, self.dtype)

    def moved(self, fn: Callable[[Tensor], Tensor]) -> StoredWeight:
        """The weight moved or converted by `fn`; scales stay at least float32, and codes are not converted."""
        like = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        return self._with(fn(self.packed), like.device, like.dtype)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight, detached from its graph."""
        return self.detach()

    @data.setter
    def data(self, _: Tensor) -> None:  # it would leave the codes as they are
        raise ConfigError(_WRITTEN.format("weight.data = ..."))

    def become(self, moved: StoredWeight) -> None:
        """Take over the device, dtype and tensors of `moved`; this object stays, since optimizers may hold it."""
        if not torch._has_compatible_shallow_copy_type(self, moved):  # to "meta", which no graph may hold
            torch.utils.swap_tensors(self, nn.Parameter(moved, requires_grad=self.requires_grad))
            return
        Tensor.data.__set__(self, moved)  # type: ignore[attr-defined]
        self.packed, self.scale, self.zero_point = moved.packed, moved.scale, moved.zero_point

    def _with(self, packed: Tensor, device: torch.device, dtype: torch.dtype) -> StoredWeight:
        scale = self.scale.to(device, compute_dtype(dtype))
        zero_point = self.zero_point
        if zero_point is not None:
            kind = scale.dtype if zero_point.is_floating_point() else zero_point.dtype
            zero_point = zero_point.to(device, kind)
        return type(self)(packed, QParams(scale, zero_point), self.spec, self.whole_shape, dtype, self.views)

    def _rows_at_once(self) -> int:
        shape = self.whole_shape
        block = self.spec.granularity.block_shape(shape)[0] if shape else 1
        block = 1 if not block or self.scale.shape[0] == 1 else block
        return max(1, _CHUNK // max(1, prod(shape[1:])) // block) * block

    def _params(self, part: Any = ...) -> QParams:
        """The scales and zero points of the rows in the slice `part`, which begins and ends at a border of blocks."""
        if part is ... or self.scale.shape[0] == 1:
            return QParams(self.scale, self.zero_point)
        block = self.spec.granularity.block_shape(self.whole_shape)[0] or 1
        own = slice(part.start // block, -(-part.stop // block))
        return QParams(self.scale[own], None if self.zero_point is None else self.zero_point[own])

    def _decoded(self, packed: Tensor, params: QParams, shape: tuple[int, ...]) -> Tensor:
        fmt, computed = self.spec.format, compute_dtype(self.dtype)
        if fmt.has_zero_point or fmt.bits > _PACKED or not shape:
            return library.dequantize(_unpack(packed, fmt, shape), params, self.spec, self.dtype).contiguous()
        # A trace has tensors of its own kind, which must not stay in the cache.
        table = (_table if type(packed) is Tensor else _table.__wrapped__)(fmt, computed, packed.device)
        patterns = unpack_bytes(packed, fmt.bits, shape[-1])
        codes = table.index_select(0, patterns.flatten().to(torch.int32)).view(shape)
        return reference.decode(codes, params, self.spec, self.dtype).contiguous()  # as the shape of this weight says

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"StoredWeight({list(self.shape)}, {str(self.spec)!r}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredWeight:
        if id(self) not in memo:
            memo[id(self)] = self._copied(memo, isinstance(self, nn.Parameter))
        return memo[id(self)]

    def _copied(self, memo: dict[int, Any], is_parameter: bool) -> Any:
        *tensors, spec, shape, dtype, views, _ = self._parts()
        return _rebuilt(*copy.deepcopy(tensors, memo), spec, shape, dtype, views, is_parameter)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuilt, self._parts()

    def _parts(self) -> tuple[Any, ...]:
        is_parameter, views = isinstance(self, nn.Parameter), [(str(op), args) for op, args in self.views]
        return self.packed, self.scale, self.zero_point, self.spec, self.whole_shape, self.dtype, views, is_parameter

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = ["packed", "scale"] if self.zero_point is None else ["packed", "scale", "zero_point"]
        return names, (self.spec, self.whole_shape, self.dtype, self.views)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> StoredWeight:
        return cls(inner["packed"], QParams(inner["scale"], inner.get("zero_point")), *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, cast("StoredWeight", args[0] if args else None)
        if func in _VIEWS and not kwargs and isinstance(first, StoredWeight):
            moves = func not in (_aten.detach.default, _aten.alias.default)
            views = (*first.views, (func, args[1:])) if moves else first.views
            params = QParams(first.scale, first.zero_point)
            return cls(first.packed, params, first.spec, first.whole_shape, first.dtype, views)
        if func is _aten._to_copy.default:
            device, dtype = torch.device(kwargs.get("device") or first.device), kwargs.get("dtype") or first.dtype
            # Such a copy, as autocast makes it, stays stored as codes, with values in the other dtype.
            halves = first.dtype is torch.float32 and dtype in (torch.bfloat16, torch.float16)
            if halves or dtype == first.dtype:
                return first._with(first.packed.to(device), device, dtype)
        if func is _aten.clone.default:
            return first._copied({}, False)
        if func is _aten.embedding.default and isinstance(first, StoredWeight):
            return first.rows(args[1])
        if func is _aten.copy_.default and all(isinstance(own, StoredWeight) for own in args[:2]):
            other = args[1]
            if (first.spec, first.whole_shape) != (other.spec, other.whole_shape) or first.views or other.views:
                raise ConfigError(f"{other} does not fit {first}; copy a weight of the same shape and specification")
            for name in ("packed", "scale", "zero_point"):
                own, given = getattr(first, name), getattr(other, name)
                if own is not None and given is not None and own is not given:
                    own.copy_(given)
            return first
        if func in _PRODUCTS and sum(isinstance(own, StoredWeight) for own in args) == 1 and not kwargs:
            return func(*(own.values(lent=True) if isinstance(own, StoredWeight) else own for own in args))
        for place, own in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if own.alias_info is not None and own.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(own.name)
                several = given if isinstance(given, (list, tuple)) else [given]
                if any(isinstance(one, StoredWeight) for one in several):
                    raise ConfigError(_WRITTEN.format(func))
        args, kwargs = tree_map_only(StoredWeight, StoredWeight.values, (args, kwargs))
        return func(*args, **kwargs)


class _Room(threading.local):
    """The buffer of each thread into which `values` with `lent` decodes a weight."""

    held: Tensor | None = None

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        if size > _ROOM:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self.held is None or self.held.numel() < size:
            self.held = None  # first, so that both are never there at once
            with torch.inference_mode(mode=False):
                self.held = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self.held[:size].view(dtype).view(shape)


_room = _Room()


def with_stored(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """In `state`, the state dict of a model, replace the packed codes of each stored weight by the `StoredWeight`."""
    every = model.named_parameters(remove_duplicate=False)
    if stored := {name + CODES: (name, own) for name, own in every if type(own) is StoredWeight}:
        specs = {name + SPEC for name, _ in stored.values()}
        items = [stored.get(name, (name, value)) for name, value in state.items() if name not in specs]
        state.clear()
        state.update(items)
    return state


def _viewed(x: Tensor, views: tuple[View, ...]) -> Tensor:
    for op, args in views:
        x = op(x, *args)
    return x


def _rebuilt(*parts: Any) -> Any:
    packed, scale, zero_point, *own, views, is_parameter = parts
    make: Any = StoredWeight
    operators = {str(op): op for op in _VIEWS}
    made = make(packed, QParams(scale, zero_point), *own, tuple((operators[name], args) for name, args in views))
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


@lru_cache(maxsize=64)
def _table(fmt: Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of all bit patterns of a format that is not an integer format, by pattern."""
    patterns = torch.arange(1 << fmt.bits, device=device)
    count = len(fmt.grid.table.values) if fmt.grid.table is not None else len(patterns)
    return fmt.from_storage(of_integers(patterns[:count].to(torch.uint8), fmt), dtype)


def _pack(codes: Tensor, fmt: Format) -> Tensor:
    if fmt.bits > _PACKED or not codes.dim():
        return as_integers(codes)
    return pack(as_integers(codes), fmt.bits, -lowest_of(fmt)).to(codes.device)


def _unpack(packed: Tensor, fmt: Format, shape: tuple[int, ...]) -> Tensor:
    if fmt.bits > _PACKED or not shape:
        return of_integers(packed, fmt)
    patterns = unpack_bytes(packed, fmt.bits, shape[-1])
    if not (lowest := lowest_of(fmt)):
        return of_integers(patterns, fmt)
    return patterns.view(torch.int8) + lowest


class StoringLayer(nn.Module):
    """A layer whose parameters may be `StoredWeight`; its state dict holds their packed codes as bytes."""

    def products(self) -> Any:
        """A `Product` for each weight that has a quantizer or may get one."""
        raise NotImplementedError

    def _stored(self) -> dict[str, StoredWeight]:
        return {name: own for name, own in self._parameters.items() if isinstance(own, StoredWeight)}

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Replace the parameter `name` by `parameter` of the same shape, which holds floats or codes."""
        self._parameters[name] = parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        stored: dict[str, Any] = self._stored()
        if not stored:
            return super()._apply(fn, recurse)
        held = [(stored[own.name], own.quantizer) for own in self.products() if own.name in stored]
        shares = [(weight, own) for weight, own in held if own is not None and own.scale is weight.scale]
        self._parameters.update(dict.fromkeys(stored))
        try:
            super()._apply(fn, recurse)
            for weight in stored.values():  # in place, because layers may share it
                weight.become(weight.moved(fn))
        finally:
            for name, weight in stored.items():
                self.put(name, weight)
        for weight, quantizer in shares:  # one copy of the scale stays one
            weight.scale, weight.zero_point = quantizer.scale, quantizer.zero_point
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (stored := self._stored()):
            return
        for name in [*self._parameters, *self._buffers]:  # in the order of the float layer
            if (value := destination.pop(prefix + name, None)) is not None:
                key, weight = prefix + name, stored.get(name)
                if weight is None:
                    destination[key] = value
                else:
                    spec = torch.tensor([*str(weight.spec).encode()], dtype=torch.uint8, device="cpu")
                    destination.update({key + CODES: weight.packed, key + SPEC: spec})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        for name, weight in self._stored().items():
            key = prefix + name
            if (packed := state_dict.get(key + CODES)) is not None:
                spec = state_dict.get(key + SPEC)
                spec = "unknown" if spec is None else bytes(spec.tolist()).decode()
                if spec != str(weight.spec):
                    what = f"the codes of {key} are {spec}, but the model stores codes of {weight.spec}"
                    raise ConfigError(f"{what}; load them into a model of that specification")
                attribute = next(own.attribute for own in self.products() if own.name == name)
                params = (state_dict.get(f"{prefix}{attribute}.{own}") for own in ("scale", "zero_point"))
                state_dict = {name: own for name, own in state_dict.items() if name not in (key + CODES, key + SPEC)}
                state_dict[key] = weight.with_parts(packed, *params)
        for name in [] if self._stored() else [*self._parameters]:
            if prefix + name + CODES in state_dict:
                args[3].append(
                    f"{prefix}{name} is stored as codes in this state: call fakequant.store_codes(model) before "
                    "load_state_dict, or use fakequant.save and fakequant.load"
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
