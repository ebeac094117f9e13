"""The engines that `advise` knows: the presets that each takes, and whether it places quantizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

from fakequant.errors import ConfigError, nearest, shown
from fakequant.model.sites.targets import targets
from fakequant.text import listed

_GROUPS = "INT4_GROUP128", "INT4_GROUP64", "INT4_GROUP32"


class EngineFormats(NamedTuple):
    """What an engine takes.

    Attributes:
        kinds: the names of presets by how the engine multiplies, those first that it runs faster: of models of one size
            only presets of one kind are compared with each other.
        page: of the documentation, "" for none.
        known: what was seen of the speed, as a sentence; "" for nothing.
        others: what the names of other presets begin with that it also runs.
        files: what it reads: the name of a format of `fakequant.deliver`, or of a style of ONNX files.
    """

    kinds: tuple[tuple[str, ...], ...]
    page: str = ""
    known: str = ""
    others: str | None = None
    files: str = ""


_WEIGHTS = "INT8_WEIGHT_ONLY", "INT4_WEIGHT_ONLY", *_GROUPS
ANY = EngineFormats(((*_WEIGHTS, "NF4_WEIGHT_ONLY", "NVFP4_WEIGHT_ONLY"),))
"""Without an engine that multiplies codes, inputs of fewer bits lose accuracy and gain nothing."""

_BLOCKS = "MXFP4", "NVFP4"
"""GPUs that multiply one of them multiply the other, too."""

_STATIC = EngineFormats((("INT8", "INT8_AFFINE"),))
_SERVERS = EngineFormats((("W8A8_DYNAMIC", "FP8"), ("INT4_GROUP128",)), "vllm", files="compressed-tensors")
_GGUF = "Q2_K", "Q3_K", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"

# As the pages in docs/engines say. ONNX Runtime multiplies codes with zero points in every layer; those of tokens were
# not counted, and convolutions with them compute in float.
ENGINES = {
    "onnxruntime": EngineFormats(
        (("INT8_AFFINE",), ("INT8_PER_TOKEN",), _WEIGHTS),
        "onnxruntime",
        "Convolutions run on integers under INT8_AFFINE, and in float under the other presets (1.31.1).",
        files="portable",
    ),
    "openvino": EngineFormats((*_STATIC.kinds, ("INT8_WEIGHT_ONLY",)), "openvino", files="portable"),
    "tensorrt": EngineFormats(
        (("INT8", "FP8"), ("INT4_GROUP64", "INT4_GROUP128", "NVFP4_WEIGHT_ONLY")), "tensorrt", files="trt"
    ),
    "qnn": _STATIC._replace(files="portable"),
    "xnnpack": _STATIC,
    "vllm": _SERVERS,
    "sglang": _SERVERS,
    "llama.cpp": EngineFormats((tuple(f"GGUF_{name}" for name in _GGUF),), "llamacpp", others="GGUF_", files="gguf"),
    "transformers": EngineFormats(
        (("W8A8_TRANSFORMERS", "FP8"), (*_WEIGHTS, "NVFP4_WEIGHT_ONLY")), "transformers", files="compressed-tensors"
    ),
    "torchao": EngineFormats(((*_WEIGHTS, "NVFP4_WEIGHT_ONLY"),), "torchao", files="torchao"),
}


holders: list[Callable[[str, nn.Module], None]] = []
"""Each raises if files of a name, see `EngineFormats`, cannot hold a prepared model; added where files are written."""


def find_engine(name: str | None) -> EngineFormats:
    """The engine of a name; None for no engine in particular.

    Raises:
        ConfigError: there is none; the nearest are offered.

    >>> find_engine("vllm").kinds
    (('W8A8_DYNAMIC', 'FP8'), ('INT4_GROUP128',))
    """
    if name is None:
        return ANY
    if not isinstance(name, str):
        raise ConfigError(f"target takes the name of an engine, such as 'onnxruntime', got {shown(name)}")
    if name not in ENGINES:
        raise ConfigError(f"unknown target {name!r}{nearest(name, sorted(ENGINES))}")
    return ENGINES[name]


def rivals(names: Iterable[str]) -> set[str]:
    """The presets that are compared with any of some presets, for any engine.

    >>> sorted(rivals(["W8A8_DYNAMIC"]))
    ['FP8', 'W8A8_DYNAMIC']
    """
    kinds = [_BLOCKS, *(kind for engine in (ANY, *ENGINES.values()) for kind in engine.kinds)]
    wanted = {*names}
    return {name for kind in kinds if wanted & {*kind} for name in kind}


def unknown_gain(name: str | None, presets: Iterable[str]) -> str:
    """A sentence where some presets are none that an engine is known to run; "" for all others, and for no engine.

    >>> unknown_gain("sglang", ["FP8"])
    ''
    >>> unknown_gain("vllm", ["INT4_GROUP32"])
    'It is not known that vllm gains by INT4_GROUP32. It takes W8A8_DYNAMIC, FP8, INT4_GROUP128: docs/engines/vllm.md.'
    """
    if name is None:
        return ""
    engine = find_engine(name)
    known = [preset for kind in engine.kinds for preset in kind]
    unknown = [one for one in presets if one not in known and not (engine.others and one.startswith(engine.others))]
    page = f": docs/engines/{engine.page}.md" if engine.page else ""
    return f"It is not known that {name} gains by {listed(unknown)}. It takes {listed(known)}{page}." if unknown else ""


def places(name: str | None) -> bool:
    """Whether an engine says where quantizers are, and folds batch normalisations."""
    return name in targets()
