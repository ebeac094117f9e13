"""The schemes of compressed-tensors: arguments of weights and activations, and the tensors of a weight."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fakequant.delivery.folder import Folder, by_transformers, initializes
from fakequant.delivery.format import LoadedFile, Part, Stored
from fakequant.errors import CheckpointError, ConfigError, ShapeError
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.run.outputs import record
from fakequant.model.sites import plan_sites
from fakequant.model.state.plan import OwnerEntry, SiteEntry, SiteQuantizerEntry, SitesEntry, sites_entry
from fakequant.model.state.snapshots import LazyTensor
from fakequant.nn.quantized.forms import own_class
from fakequant.nn.quantizer import Quantizer, quantizers
from fakequant.numerics.formats import IntegerFormat, parse_format
from fakequant.numerics.formats.floats import Format
from fakequant.numerics.formats.packing import pack, unpack, viewed
from fakequant.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor, PerToken
from fakequant.numerics.qparams import Range, choose_qparams
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.restore import attributes_of, restore_after
from fakequant.text import listed

_parser: Any = re._parser if hasattr(re, "_parser") else import_module("sre_parse")  # type: ignore[attr-defined]  # before Python 3.11
Args = dict[str, Any]
ROLES = {"weight": "weights", "input": "input_activations", "output": "output_activations"}
"""By the name of a layer's tensor, its name in a scheme."""
PACKED = "pack-quantized"
LAYOUTS = {
    (4, 16, "torch.float8_e4m3fn"): "nvfp4-pack-quantized",
    (4, 32, "torch.uint8"): "mxfp4-pack-quantized",
    (6, 32, "torch.uint8"): "mxfp6-pack-quantized",
    (8, 32, "torch.uint8"): "mxfp8-quantized",
}
"""Names of layouts of floats whose scales have a format, by the bits, the size of groups and the type of scales."""
_ALIKE = {"naive-quantized", "float-quantized", "int-quantized"}
"""Names of layouts that hold the same tensors."""
FLOATS = {torch.float32, torch.float16, torch.bfloat16}
"""The dtypes that scales have in files."""
HEADS = "attn_head"
"""The strategy of keys, values and queries [batch, heads, tokens, width] with a scale for each head."""
LOCAL = "local"
"""The value of `dynamic` for inputs whose blocks have dynamic scales, which a fixed second-level scale multiplies."""
HALF_RANGE = "dynamic INT8 by transformers of "
"""The prefix before a layer's name of a key in a file's header, which says that inputs have transformers' scales."""
EXACT = "exact global scale of "
"""The prefix before a layer's name of a header's key for an exact scale; the file's tensor has its reciprocal."""
PLAIN = "re:experts in float"
"""The target of an FP8 scheme that no layer has. transformers takes the first scheme for "experts" for all tensors that
it merges, and keeps tensors in float only under FP8. Servers were not run with such a file."""
_FORMATS = {one.bits: one for one in map(parse_format, ("float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn"))}
_POWERS, _E4M3 = parse_format("float8_e8m0fnu"), _FORMATS[8]
_HALVES = {torch.float16: parse_format("float16"), torch.bfloat16: parse_format("bfloat16")}
_DTYPES = {_POWERS: "torch.uint8", _E4M3: "torch.float8_e4m3fn"}
_LONG, _MOST_CHOICES, _FEW_TIMES = 2_000, 18, 8
"""The limits of a pattern in a file: its characters, its choices, and how many repeats of a part are no choice."""
_PROBE = torch.tensor([1e-3, 0.3, 1.0, 1.3, 1.74, 1.75, 1.76, 1.9, 1.95, 3.0, 6.0, 7.1, 447.0, 450.0], device="cpu")
"""Ranges by which two rules for scales are told apart."""


def scheme_of(part: Part) -> Args | str:
    """The scheme of a layer, or the reason why it has none."""
    scheme: Args = {}
    for name, role in ROLES.items():
        if (config := part.operands.get(name)) is None:
            continue
        columns = part.shape[-1 if name == "input" else -2]
        found = _weight_args(config.spec, part.shape) if name == "weight" else _activation_args(config, columns)
        if isinstance(found, str):
            return f"its {name} is {config}, and {found}"
        if part.is_stack and name == "input" and found["dynamic"] is False:
            return f"its input is {config}, but servers load stacked experts only with a dynamic range for every token"
        scheme[role] = found
    return {**scheme, "format": _layout_of(scheme["weights"], ROLES["input"] in scheme)}


def attention_args(part: Part) -> Args | str:
    """The arguments for keys, values and queries in a call of attention, or the reason why there are none."""
    if "attention" not in part.kind or part.operands.keys() - {"query", "key", "value"}:
        return "files quantize keys and values of attention, and queries with them, and no other functions"
    found = [_call_args(config) for config in part.operands.values()]
    first = found[0]
    if isinstance(first, str) or any(one != first for one in found) or not {"key", "value"} <= part.operands.keys():
        return "files have one quantization for keys, values and quantized queries"
    if first["strategy"] not in ("tensor", HEADS) or first["dynamic"] or not first["symmetric"]:
        return "keys and values have fixed scales, one for a layer or for each head, and no zero point"
    return first


def _call_args(config: TensorConfig) -> Args | str:
    """The arguments for keys, values or queries [batch, heads, tokens, width], or the reason why there are none."""
    try:
        is_of_heads = [*config.spec.granularity.block_shape((2, 3, 5, 7))] == [2, 1, 5, 7]
    except ShapeError:  # of blocks
        is_of_heads = False
    whole = TensorConfig(config.spec.replace(granularity=PerTensor()), config.dynamic)
    args = _activation_args(whole if is_of_heads else config, 1)
    return {**args, "strategy": HEADS} if is_of_heads and not isinstance(args, str) else args


def _layout_of(weights: Args, has_input: bool) -> str:
    if weights["type"] == "int":
        return "int-quantized" if has_input else PACKED
    key = (weights["num_bits"], weights.get("group_size", 0), weights.get("scale_dtype", ""))
    return LAYOUTS.get(key) or ("float-quantized" if has_input else "naive-quantized")


def shift_of(format: Format) -> int:
    """The number that is subtracted from codes, because files have signed integers."""
    return 0 if format.signed else 1 << format.bits - 1


def _element(spec: QuantSpec) -> Args | str:
    """The arguments for the format of a specification, or the reason why no file can hold this format."""
    format, shift, half = spec.format, shift_of(spec.format), 1 << spec.format.bits - 1
    if not spec.arithmetic.is_linear:
        return f"files multiply codes by scales, and {spec.arithmetic} does not"
    if spec.scale.rounding is ScaleRounding.SIGNED:
        return "programs expect positive scales, but these have signs"
    if getattr(spec, "offset", None) is not None:
        return "files have zero points among the codes, and no offsets in units of x"
    if format == _FORMATS.get(format.bits):
        return {"num_bits": format.bits, "type": "float", "symmetric": True}
    fits = -half <= format.quant_min - shift and format.quant_max - shift < half
    if format.has_zero_point and 2 <= format.bits <= 8 and fits:
        return {"num_bits": format.bits, "type": "int", "symmetric": spec.symmetric and format.signed}
    return f"files have integers of 2 to 8 bits, {', '.join(map(str, _FORMATS.values()))}"


def _weight_args(spec: QuantSpec, shape: Sequence[int]) -> Args | str:
    """The arguments for a weight [..., out, in], or the reason why there are none."""
    args, (rows, columns) = _element(spec), shape[-2:]
    if isinstance(args, str):
        return args
    try:
        *stack, height, width = spec.granularity.block_shape(shape)
    except ShapeError as error:
        return str(error)
    is_float = args["type"] == "float"
    if stack and (stack != [1] or (height, width) == (rows, columns) or not args["symmetric"]):
        return "files have scales of experts for rows, or for groups of inputs, of one expert, and no zero points"
    # A longer group is a whole row, but scales with a format are in no layout of rows.
    if height == 1 and columns % width and (width < columns or (is_float and spec.scale.format in _DTYPES)):
        return f"groups divide the inputs, and {columns} is not a multiple of {width}"
    own = _own_scales(spec, (*shape[:-2], rows, columns // width)) if is_float and height == 1 else None
    if own is not None and (args["num_bits"], width, own["scale_dtype"]) in LAYOUTS:
        return {**args, **own, "group_size": width}
    if is_float and args["num_bits"] < 8:
        return (
            f"files have {spec.format} in groups of 32 under {_POWERS}, of 4 bits also of 16 under {_E4M3}@per_tensor"
        )
    if height >= rows and width >= columns:
        return {**args, "strategy": "tensor"}
    if height == 1:
        # Programs give all experts of a layer one scheme: also a stack whose groups are whole rows has groups.
        is_group = width < columns or (width == columns and stack and isinstance(spec.granularity, PerBlock))
        return {**args, **({"strategy": "group", "group_size": width} if is_group else {"strategy": "channel"})}
    if is_float:
        return {**args, "strategy": "block", "block_structure": [height, width]}
    return "files have a scale of integers for the whole weight, for each row, or for each group of inputs"


def _own_scales(spec: QuantSpec, scales: Sequence[int]) -> Args | None:
    """The arguments for scales [..., out, groups] that have a format; None if no layout of files has them."""
    shared = spec.scale.granularity
    if getattr(spec.scale, "shared", None) is not None or spec.scale.format not in _DTYPES:
        return None
    if shared is None:  # E4M3 scales alone are in no layout: NVFP4 has them under a scale of the tensor
        return {"strategy": "group", "scale_dtype": _DTYPES[_POWERS]} if spec.scale.format == _POWERS else None
    if shared.group_shape(scales) != (*scales[:-2], 1, 1):
        return None
    return {"strategy": "tensor_group", "scale_dtype": _DTYPES[spec.scale.format]}


def _activation_args(config: TensorConfig, columns: int) -> Args | str:
    """The arguments for an activation [..., columns], or the reason why there are none."""
    spec, args = config.spec, _element(config.spec)
    if isinstance(args, str):
        return args
    if spec.rounding is not Rounding.NEAREST_EVEN:
        return "programs round activations to the nearest code"
    args |= {"symmetric": spec.symmetric, "dynamic": config.dynamic}
    try:
        *whole, width = spec.granularity.block_shape((2, 3, columns))
    except ShapeError as error:
        return str(error)
    if whole == [2, 3] and width >= columns:
        args["strategy"] = "tensor"
    elif whole != [1, 1] or not config.dynamic or (columns % width and width < columns):
        return "ranges of activations are fixed per tensor, or dynamic per tensor, token or group"
    else:
        args |= {"strategy": "token"} if width >= columns else {"strategy": "group", "group_size": width}
    own = _own_scales(spec, (6, columns // width)) if (args["num_bits"], width) == (4, 16) else None
    if own and spec.scale.rounding is ScaleRounding.NEAREST:
        return {**args, **own, "dynamic": LOCAL}
    if spec.scale.format == _POWERS and args.get("group_size") == 32:
        args["scale_dtype"] = _DTYPES[_POWERS]
    elif spec.scale.format is not None:
        return f"scales of activations are float32, or {_POWERS} for groups of 32"
    if config.dynamic and not _is_their_rule(spec, args):
        return (
            "programs compute dynamic scales in other ways: vLLM of INT8 by amax / 127 and its reciprocal (preset "
            "W8A8_DYNAMIC), transformers of integers by amax / (2**bits - 1) * 2, and powers of two of floats by "
            f"{_POWERS}:even, with 8 bits by {_POWERS}:even_fp4"
        )
    is_fixed = not config.dynamic and spec.arithmetic is not Arithmetic.DIVIDE
    return "programs divide activations by their scale" if is_fixed else args


def _is_their_rule(spec: QuantSpec, args: Args) -> bool:
    """Whether a specification chooses the same scales from ranges as compressed-tensors, or as vLLM does."""
    theirs = config_of(args).spec
    if spec.arithmetic is not Arithmetic.DIVIDE:
        return (spec.arithmetic, spec.scale) == (theirs.arithmetic, theirs.scale)
    largest = torch.tensor(float(spec.format.bound), device="cpu")
    if not spec.symmetric:
        return spec.format.quant_max - spec.format.quant_min == (1 << spec.format.bits) - 1
    if "scale_dtype" in args:
        mantissa, exponent = torch.frexp(_PROBE)
        up = mantissa >= ScaleSpec(_POWERS, _of_powers(spec.format.bits, dynamic=True)).up_from(spec.format)
        theirs = torch.ldexp(torch.ones_like(_PROBE), exponent + up.int() - torch.frexp(largest)[1])
    else:
        steps = torch.tensor(float((1 << spec.format.bits) - 1), device="cpu") if args["type"] == "int" else 2 * largest
        theirs = _PROBE / (steps / 2)
    return torch.equal(choose_qparams(Range(-_PROBE, _PROBE), spec).scale, theirs)


def _of_powers(bits: int, *, dynamic: bool) -> ScaleRounding:
    """The rounding of power-of-two scales; for dynamic inputs of 8 bits that for FP4, as in `generate_mx_scales`."""
    if not dynamic:
        return ScaleRounding.FLOOR
    return ScaleRounding.EVEN_FP4 if bits == 8 else ScaleRounding.EVEN


def normalized(group: Mapping[str, Any], format: str | None) -> Args:
    """A scheme of a file, with defaults for omitted arguments; raises CheckpointError for an unknown argument."""
    scheme: Args = {"targets": [str(target) for target in group["targets"]]}
    for role in ROLES.values():
        if (given := group.get(role)) is None:
            continue
        args = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, **given}
        args = {key: value for key, value in args.items() if value is not None}
        size = args.get("group_size", 0)
        args["strategy"] = args.get("strategy") or ("group" if size > 0 else "channel" if size else "tensor")
        if (args["num_bits"], size, args.get("scale_dtype")) not in LAYOUTS or args["type"] == "int":
            args.pop("scale_dtype", None)
        scheme[role] = args
        config_of(args)
        if args["strategy"] == HEADS and (role != ROLES["input"] or group.get(ROLES["weight"]) is not None):
            raise CheckpointError(f"the strategy {HEADS} is for attention, but a scheme has it for {role} of layers")
    if (weights := scheme.get(ROLES["weight"])) is not None:
        scheme["format"] = _layout_of(weights, ROLES["input"] in scheme)
        named = group.get("format") or format
        if named == PACKED and weights["type"] == "int":
            scheme["format"] = PACKED
        if named not in (scheme["format"], "mixed-precision", None) and not {named, scheme["format"]} <= _ALIKE:
            raise CheckpointError(f"a scheme has the format {named!r:.40}, but its weights have {scheme['format']}")
    return scheme


def config_of(
    args: Mapping[str, Any], scales: torch.dtype = torch.float32, *, half_range: bool = False
) -> TensorConfig:
    """The configuration of a tensor from its arguments in a scheme.

    Files do not say how a program computes the scales of dynamic integers. INT8 per token gets the rule of vLLM 0.32,
    unless `half_range` is True. Everything else gets the rule of compressed-tensors 0.20 in transformers.
    """
    bits, kind, strategy, dynamic = args["num_bits"], args["type"], args["strategy"], args["dynamic"]
    places: dict[str, Granularity] = {"tensor": PerTensor(), "channel": PerChannel(0), "token": PerToken()}
    places[HEADS] = PerChannel(1)
    if "group" in strategy:
        places[strategy] = PerBlock({-1: args["group_size"]}, pad=True)
    elif strategy == "block":
        places[strategy] = PerBlock(dict(zip((0, -1), args["block_structure"], strict=True)), pad=True)
    is_local = dynamic == LOCAL and strategy == "tensor_group"
    known = bits in range(2, 9) if kind == "int" else kind == "float" and bits in _FORMATS
    if not known or strategy not in places or not (dynamic in (True, False) or is_local):
        raise CheckpointError(f"this reader does not know all arguments of a scheme: {dict(args)}")
    scale = ScaleSpec(_HALVES.get(scales))
    if "scale_dtype" in args:
        powers = ScaleSpec(_POWERS, _of_powers(bits, dynamic=bool(dynamic)))
        scale = ScaleSpec(_E4M3, granularity=PerTensor()) if strategy == "tensor_group" else powers
    arithmetic = Arithmetic.DIVIDE
    if dynamic and kind == "int" and args["symmetric"]:
        is_of_servers = bits == 8 and strategy == "token" and not half_range
        arithmetic = Arithmetic.RECIPROCAL if is_of_servers else arithmetic
        scale = ScaleSpec() if is_of_servers else ScaleSpec(None, ScaleRounding.HALF_RANGE)
    format: Format = IntegerFormat.of(bits) if kind == "int" else _FORMATS[bits]
    spec = QuantSpec(format, places[strategy], symmetric=args["symmetric"], scale=scale, arithmetic=arithmetic)
    return TensorConfig(spec, bool(dynamic))


def groups_of(folder: Folder) -> list[Args]:
    """The schemes of a folder; raises CheckpointError if there are none, or this reader does not know them."""
    given = folder.quantization
    if not given.get("config_groups"):
        raise CheckpointError(f"{folder.path} holds no codes: its quantization_config has no config_groups")
    sparsity = given.get("sparsity_config") or {}
    is_dense = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"
    given = {**given, "sparsity_config": None if is_dense else sparsity}
    if left := [key for key in ("transform_config", "sparsity_config") if given.get(key)]:
        raise CheckpointError(f"{folder.path} has {', '.join(left)}, which this reader does not know")
    found = [normalized(one, given.get("format")) for one in given["config_groups"].values()]
    return [one for one in found if one["targets"] != [PLAIN]]


def scheme_for(folder: Folder, names: Sequence[str], classes: Sequence[str]) -> Args | None:
    """The scheme of a layer, None for float; the first target counts: its name, then patterns, then classes."""

    def rank(target: str) -> int:
        if target.startswith("re:"):
            pattern = _compiled(target[3:])
            return 1 if any(map(pattern.match, names)) else 3
        return 0 if target in names else 2 if target in classes else 3

    groups = groups_of(folder)
    ranked = [(rank(target), number) for number, one in enumerate(groups) for target in one["targets"]]
    best, number = min(ranked, default=(3, 0))
    is_left = any(rank(target) < 3 for target in folder.quantization.get("ignore") or [])
    return groups[number] if best < 3 and not is_left and ROLES["weight"] in groups[number] else None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression of a file; raises CheckpointError if nested repeats or many choices make it slow."""
    try:
        if len(pattern) > _LONG:
            raise CheckpointError(f"{len(pattern)} characters")
        if _choices(_parser.parse(pattern)) > _MOST_CHOICES:
            raise CheckpointError("too many repeats and alternatives")
        return re.compile(pattern)
    except (CheckpointError, re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"the pattern {pattern!r:.80} for names of layers has {error}, which this reader refuses; write a "
            "pattern without nested repeats"
        ) from error


def _choices(items: Any) -> int:
    """Estimate the choices in a parsed regular expression; an unlimited repeat is 3: it can end at many places."""
    count = 0
    for operator, argument in items:
        name, parts = str(operator), list[Any]()
        if name.endswith("REPEAT"):
            least, most, body = argument
            inner = _choices(body)
            if inner and most > _FEW_TIMES:
                raise CheckpointError("a repeat of a part that repeats or has alternatives")
            count += 3 * (most > _FEW_TIMES) or int(least != most)
            count += inner * most
        elif name == "BRANCH":
            count, parts = count + 1, argument[1]
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            parts = [argument[-1]]
        elif name == "ATOMIC_GROUP":
            parts = [argument]
        elif name.startswith("GROUPREF"):
            raise CheckpointError("a reference to a group")
        count += sum(map(_choices, parts))
    return count


def stored(
    scheme: Mapping[str, Any], format: Format, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> dict[str, Stored]:
    """For the end of each stored name, the tensor of a weight [out, in]; scales without a format have `dtype`."""
    args, (rows, columns), shift = scheme["weights"], shape, shift_of(format)
    bits, is_packed, is_tensor = args["num_bits"], scheme["format"] == PACKED, args["strategy"] == "tensor"
    high, wide = args.get("block_structure") or (1, args.get("group_size") or columns)
    groups = (1, 1) if is_tensor else (-(-rows // high), -(-columns // wide))
    flat = (1,) if is_tensor else groups

    def signed(x: Tensor) -> Tensor:
        # Bytes wrap around, so that one of each number is enough.
        return x if x.dtype is torch.int8 else (x.to(torch.uint8) + -shift % 256).view(torch.int8)

    def words(x: Tensor) -> Tensor:
        packed = pack(x, bits, (1 << bits - 1) - shift)
        left = -packed.shape[-1] % 4
        return viewed(pad(packed, (0, left)) if left else packed, torch.int32)

    def of_words(x: Tensor, count: int) -> Tensor:
        return (unpack(viewed(x, torch.uint8), bits, count) - (1 << bits - 1)).to(torch.int8)

    found: dict[str, Stored] = {}
    if is_packed:
        size = (rows, -(-columns * bits // 32))
        found["weight_packed"] = Stored("codes", size, torch.int32, words, partial(of_words, count=columns))
    elif args["type"] == "int":
        found["weight"] = Stored("codes", (rows, columns), torch.int8, signed)
    elif bits == 8:
        found["weight"] = Stored("codes", (rows, columns), format.storage)
    else:
        size = (rows, columns * bits // 8)
        to_codes: Callable[[Tensor], Tensor] = lambda x: unpack(x, bits, columns).to(torch.uint8)  # noqa: E731
        found["weight_packed"] = Stored("codes", size, torch.uint8, partial(pack, bits=bits), to_codes)
    if args["strategy"] == "tensor_group":
        found["weight_scale"] = Stored("scale_codes", groups, _E4M3.storage)
        found["weight_global_scale"] = Stored("shared", (1,), torch.float32, reciprocal, reciprocal)
    elif "scale_dtype" in args:
        found["weight_scale"] = Stored(
            "scale", groups, torch.uint8, lambda x: _POWERS.to_storage(x).view(torch.uint8), _powers
        )
    else:
        found["weight_scale"] = Stored("scale", flat, dtype, lambda x: x.reshape(flat).to(dtype), Tensor.float)
    if not args["symmetric"]:
        point = Stored("zero_point", flat, torch.int8, lambda x: signed(x).reshape(flat))
        if is_packed and not is_tensor:
            size = (-(-rows * bits // 32), groups[1])
            point = Stored("zero_point", size, torch.int32, lambda x: words(x.mT).mT, lambda x: of_words(x.mT, rows).mT)
        found["weight_zero_point"] = point
    return found


def reciprocal(x: Tensor) -> Tensor:
    """The reciprocal of the first number of x, in float32."""
    return (1 / x.float().flatten()[:1]).float()


def _powers(x: Tensor) -> Tensor:
    if bool((x == 255).any()):
        raise CheckpointError("scales of powers of two hold NaN")
    return torch.ldexp(torch.ones(x.shape, device="cpu"), x.to(torch.int32) - 127)


_CACHE = {"past_key_values", "past_key_value"}
"""The names of the argument by which compressed-tensors 0.20 gives quantized keys and values to an attention."""


def missed_cache(modules: Iterable[nn.Module]) -> str:
    """A sentence that says why some keys and values stay in float in transformers; "" if all are quantized."""
    classes = {own_class(module) for module in modules}
    names = [cls.__name__ for cls in classes if not _CACHE & {*inspect.signature(cls.forward).parameters}]
    if not names:
        return ""
    return (
        f"Keys and values stay in float in transformers: {listed(sorted(names))} takes its cache by another name than "
        f"{' or '.join(sorted(_CACHE))}, which compressed-tensors gives; transformers 5.23 has these names."
    )


def attention_sites(model: nn.Module, config: TensorConfig, operands: Collection[str]) -> SitesEntry:
    """The calls of attention of a language model, with quantizers of some operands.

    A float model runs once with two tokens to find its calls; a prepared model already has them.
    """
    if quantizers(model):
        return sites_entry(model)
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    try:
        recording = record(model, lambda: model(input_ids=tokens, use_cache=False))
        plan = plan_sites(model, Config("attention", (Rule("*", ops=("attention",), input=config),)), recording)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"keys and values are quantized, but the model calls no attention: {error}") from error
    keys = {path: list(own) for path, own in plan.training_keys.items()}
    owners = {
        path: OwnerEntry(type(model.get_submodule(path)).__name__, list(steps), {}, keys.get(path))
        for path, steps in plan.steps.items()
    }
    for site in plan.sites:
        entries = {
            name: SiteQuantizerEntry(one.tensor, kind=one.kind, group=one.group)
            for name, one in site.quantizers.items()
            if name in operands
        }
        owners[site.owner].sites[site.key] = SiteEntry(list(site.operands), entries, weights=dict(site.weights))
    return SitesEntry(owners, list(plan.shielded))


def conflicts_of_calls(model: nn.Module, parts: Sequence[Part]) -> dict[str, str]:
    """For names of attention calls: why a file cannot hold their keys and values beside those of others."""
    calls = {part.path: part for part in parts if part.call}
    classes = {type(part.module) for part in calls.values()} | {own_class(part.module) for part in calls.values()}
    others = [path for path, one in model.named_modules() if type(one) in classes and path not in calls]
    schemes = {part.name: attention_args(part) for part in calls.values()}
    first = next(iter(schemes.values()), None)
    found = {
        name: "files have one scheme of keys and values for all layers" for name, one in schemes.items() if one != first
    }
    return found | dict.fromkeys(others, "files have keys and values of all layers quantized, or of none")


Scheme = Mapping[str, Any]
OTHER_RULE = (
    "the scale of dynamic INT8 is amax / 127.5 there, as in the preset W8A8_TRANSFORMERS, and amax / 127 in vLLM and "
    "W8A8_DYNAMIC"
)


def needs_dequantize(
    schemes: Sequence[Scheme], tensors: Mapping[str, Tensor | LazyTensor], dtype: torch.dtype, *, starts: bool = True
) -> bool:
    """Whether transformers needs `dequantize=True` to load the same weights; `starts` is of `initializes`."""
    weights = [one for one in schemes if ROLES["weight"] in one]
    if not starts or (dtype is not torch.bfloat16 and any(map(_is_decompressed_in_bfloat16, weights))):
        return True
    if any(one["format"] == PACKED and not one["weights"]["symmetric"] for one in weights):
        return True
    scales = (name for name in tensors if name.endswith(".weight_scale"))
    return dtype is not torch.float32 and any(tensors[name].dtype is torch.float32 for name in scales)


def _is_decompressed_in_bfloat16(scheme: Scheme) -> bool:
    """Whether compressed-tensors decompresses a weight in bfloat16 for models of any dtype."""
    return "scale_dtype" in scheme["weights"]


def runs_in_bfloat16(schemes: Sequence[Scheme]) -> bool:
    """Whether transformers quantizes the inputs, and multiplies them by the weights in bfloat16."""
    weights = [one for one in schemes if ROLES["weight"] in one]
    return any(ROLES["input"] in one for one in weights) and all(map(_is_decompressed_in_bfloat16, weights))


def how_to_load(
    schemes: Sequence[Scheme],
    tensors: Mapping[str, Tensor | LazyTensor],
    dtype: torch.dtype,
    *,
    starts: bool = True,
    merged: Sequence[str] = (),
    unmerged: Sequence[str] = (),
) -> str:
    """The conditions, for a message, under which transformers loads the same weights; "" if it always does.

    Args:
        starts: of `initializes`.
        merged: of `LayeredWriter`, as `unmerged`.
    """
    if unmerged:
        return f"in no way: it fails on {listed(unmerged)} of this class, which it merges in files, without codes"
    if not needs_dequantize(schemes, tensors, dtype, starts=starts):
        return ""
    if merged:
        return f"in no way: it needs dequantize=True, which fails on {listed(merged)}, which it merges in files"
    if starts and runs_in_bfloat16(schemes):
        return "in bfloat16, which the model is not; with dequantize=True it leaves inputs in float"
    if len(schemes) > 1:
        return "in part: it needs dequantize=True, and takes the scheme of one layer for all of them then"
    why = (
        "on zero points, or rounds scales" if starts else "to initialize the class, which reads weights that are packed"
    )
    return f"with dequantize=True in its CompressedTensorsConfig: else it fails {why}"


def is_fp8(scheme: Scheme) -> bool:
    """Whether a scheme quantizes weights to FP8."""
    return (scheme["weights"]["type"], scheme["weights"]["num_bits"]) == ("float", 8)


def decompressed(scheme: Scheme, tensors: Mapping[str, Tensor], bases: Sequence[str]) -> dict[str, Tensor]:
    """The values that the package compressed-tensors computes for a weight, by their names in files."""
    # Packages of the extra `delivery`, which type checkers need not have.
    compressor: Any = import_module("compressed_tensors.compressors").BaseCompressor
    scheme_class: Any = import_module("compressed_tensors.quantization").QuantizationScheme
    found = {}
    for base in bases:
        own = {name.rpartition(".")[2]: tensors[name] for name in tensors if name.rpartition(".")[0] == base}
        decompress = compressor.get_value_from_registry(scheme["format"]).decompress
        found[f"{base}.weight"] = decompress(own, scheme_class.model_validate(scheme))["weight"]
    return found


@contextmanager
def computed_by_transformers(model: nn.Module) -> Iterator[None]:
    """A context in which a model computes dynamic INT8 by the rule of transformers, not by the rule of servers."""
    held = _computed_by_servers(model)
    rule = ScaleSpec(None, ScaleRounding.HALF_RANGE)
    with restore_after(attributes_of(held, "spec")):
        for one in held:
            one.spec = one.spec.replace(arithmetic=Arithmetic.DIVIDE, scale=rule)
        yield


def engine_of(
    path: Path, model: nn.Module, groups: Sequence[Scheme], packed: Iterable[str], missed: str = ""
) -> LoadedFile:
    """The model that transformers loads from a folder.

    Args:
        groups: the schemes of the folder.
        packed: the paths of the layers with packed codes.
        missed: the sentence of `missed_cache`.
    """
    import transformers

    dtype = next(model.parameters()).dtype
    coded, starts = [one for one in groups if "weights" in one], initializes(model, packed)
    name, options, note = f"transformers {transformers.__version__}", dict[str, Any](), ""
    if any(one["weights"]["strategy"] == "tensor_group" for one in coded):
        note = "decompresses NVFP4 in bfloat16, of experts without the second-level scale"
    elif needs_dequantize(coded, Folder(path).tensors(), dtype, starts=starts) and not (
        starts and runs_in_bfloat16(coded)
    ):
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
        if len(coded) > 1:
            note = "dequantizes all layers by one scheme, and the file has several"
        elif ROLES["input"] in coded[0]:
            note = "leaves activations in float where it dequantizes at once"
    elif dtype is not torch.float32 and any(
        args.get("dynamic") and "scale_dtype" not in args for args in (one.get(ROLES["input"], {}) for one in coded)
    ):
        note = f"rounds scales of dynamic inputs to {dtype}"
    if note or missed:
        return LoadedFile(name, notes=[f"Outputs are not compared in {name}: it {note}." if note else missed])
    loaded: Any = by_transformers(path, dtype, **options)
    if runs_in_bfloat16(coded):  # the first call would decompress; other dtypes need it earlier
        loaded.hf_quantizer.compressor.decompress_model(loaded)
    # transformers decompresses experts in bfloat16; to convert other models would round their float32 buffers.
    loaded = loaded.to(dtype) if dtype is torch.float32 else loaded
    is_of_servers = bool(_computed_by_servers(model))
    notes = [f"Outputs of {name} are compared by its rule: {OTHER_RULE}."] if is_of_servers else []
    return LoadedFile(name, model=loaded, as_it=computed_by_transformers, notes=notes)


def _computed_by_servers(model: nn.Module) -> list[Quantizer]:
    """The quantizers that compute dynamic INT8 by the rule of servers."""
    return [one for one in quantizers(model).values() if one.dynamic and one.spec.arithmetic is Arithmetic.RECIPROCAL]
