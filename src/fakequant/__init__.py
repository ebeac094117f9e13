"""fakequant: fake quantization for PyTorch, bit for bit the same on every backend.

The functions work on tensors (`fake_quantize`, `quantize`, `dequantize`, `choose_qparams`) or on models (`prepare`,
`calibrate`, `summary`, `sensitivity`, `qat`, `save`, `load`, `export_onnx`, `verify_onnx`); `ir` captures a model
as a graph; `compat` offers the interfaces of other libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fakequant.errors import FakeQuantError
from fakequant.functional import choose_qparams, dequantize, fake_quantize, fake_quantize_, quantize
from fakequant.numerics.formats import FloatFormat, Format, IntegerFormat, formats, parse_format, register_format
from fakequant.numerics.formats.floats import Specials, TableFormat
from fakequant.numerics.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    StoredScales,
    register_granularity,
)
from fakequant.numerics.qparams import QParams, Range
from fakequant.numerics.scales import OffsetSpec, ScaleRounding, ScaleSpec
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec, Rounding
from fakequant.registry import import_later
from fakequant.version import __version__ as __version__

if TYPE_CHECKING:
    from fakequant import compat as compat
    from fakequant import ir as ir
    from fakequant import nn
    from fakequant.calibration import register_calibrator
    from fakequant.delivery import deliver, encode, read, verify_delivery
    from fakequant.export import (
        export_coreai,
        export_coreml,
        export_encodings,
        export_executorch,
        export_litert,
        export_onnx,
        export_pt2e,
        read_encodings,
        verify_onnx,
    )
    from fakequant.model import presets
    from fakequant.model.bake import bake_weights, fold, store_codes, store_floats
    from fakequant.model.calibrate import calibrate, recalibrate
    from fakequant.model.engine import Engine, known_engines, register_engine, set_execution
    from fakequant.model.placement import Target
    from fakequant.model.prepare import prepare
    from fakequant.model.presets import Config, Rule, TensorConfig, register_preset
    from fakequant.model.sensitivity import layer_sqnr, sensitivity
    from fakequant.model.sites import site_plan
    from fakequant.model.state import (
        LazyTensor,
        QuantizedState,
        WeightCodes,
        apply,
        float_state_dict,
        load,
        register_codec,
        save,
        snapshot,
    )
    from fakequant.model.summary import summary, unquantized
    from fakequant.model.training import qat
    from fakequant.model.training.fuse import fuse_batch_norm
    from fakequant.model.weights import disabled
    from fakequant.nn.backward import GradientConfig
    from fakequant.ptq import advise, compare, search
    from fakequant.report.of_model import report
    from fakequant.streaming import improve_folder

__all__ = [
    "Arithmetic",
    "Config",
    "Engine",
    "FakeQuantError",
    "FloatFormat",
    "Format",
    "Gradient",
    "GradientConfig",
    "Granularity",
    "IntegerFormat",
    "LazyTensor",
    "OffsetSpec",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "PerToken",
    "QParams",
    "QuantSpec",
    "QuantizedState",
    "Range",
    "Rounding",
    "Rule",
    "ScaleRounding",
    "ScaleSpec",
    "Specials",
    "StoredScales",
    "TableFormat",
    "Target",
    "TensorConfig",
    "WeightCodes",
    "advise",
    "apply",
    "bake_weights",
    "calibrate",
    "choose_qparams",
    "compare",
    "deliver",
    "dequantize",
    "disabled",
    "encode",
    "export_coreai",
    "export_coreml",
    "export_encodings",
    "export_executorch",
    "export_litert",
    "export_onnx",
    "export_pt2e",
    "fake_quantize",
    "fake_quantize_",
    "float_state_dict",
    "fold",
    "formats",
    "fuse_batch_norm",
    "improve_folder",
    "known_engines",
    "layer_sqnr",
    "load",
    "nn",
    "parse_format",
    "prepare",
    "presets",
    "qat",
    "quantize",
    "read",
    "read_encodings",
    "recalibrate",
    "register_calibrator",
    "register_codec",
    "register_engine",
    "register_format",
    "register_granularity",
    "register_preset",
    "report",
    "save",
    "search",
    "sensitivity",
    "set_execution",
    "site_plan",
    "snapshot",
    "store_codes",
    "store_floats",
    "summary",
    "unquantized",
    "verify_delivery",
    "verify_onnx",
]

# Imported at first use, so that `import fakequant` does not load the code that works on models.
_MODULES = ("compat", "ir", "nn", "plot", "ptq", "presets", "qat", "report")
_MEMBERS = {
    "fakequant.calibration": ("register_calibrator",),
    "fakequant.delivery": ("deliver", "encode", "read", "verify_delivery"),
    "fakequant.export": (
        *("export_coreai", "export_coreml", "export_executorch", "export_litert", "export_onnx", "export_pt2e"),
        *("export_encodings", "read_encodings", "verify_onnx"),
    ),
    "fakequant.model.sensitivity": ("layer_sqnr", "sensitivity"),
    "fakequant.model.bake": ("bake_weights", "fold", "store_codes", "store_floats"),
    "fakequant.model.calibrate": ("calibrate", "recalibrate"),
    "fakequant.model.state": (
        *("LazyTensor", "QuantizedState", "WeightCodes", "apply", "float_state_dict", "load", "register_codec"),
        *("save", "snapshot"),
    ),
    # not from config: a rule takes a preset's name
    "fakequant.model.presets": ("Config", "Rule", "TensorConfig", "register_preset"),
    "fakequant.nn.backward": ("GradientConfig",),
    "fakequant.model.training.fuse": ("fuse_batch_norm",),
    "fakequant.model.weights": ("disabled",),
    "fakequant.model.summary": ("summary", "unquantized"),
    "fakequant.model.prepare": ("prepare",),
    "fakequant.model.sites": ("site_plan",),
    "fakequant.model.engine": ("Engine", "known_engines", "register_engine", "set_execution"),
    "fakequant.model.placement": ("Target",),
    "fakequant.ptq": ("advise", "compare", "search"),
    "fakequant.streaming": ("improve_folder",),
}
for _room in ("export", "delivery", "engines"):  # they register presets, what files can hold, and devices
    import_later(lambda room=_room: import_module(f"fakequant.{room}"))
_PLACES = {member: module for module, members in _MEMBERS.items() for member in members}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = import_module(f"fakequant.{name}")
    elif name in _PLACES:
        value = getattr(import_module(_PLACES[name]), name)
    else:
        raise AttributeError(f"module 'fakequant' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
