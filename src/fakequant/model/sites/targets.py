"""Where engines want quantizers: one table per engine, read by `model/sites/placement.py`. Tables hold names alone.

They are made when asked for, so that a function that `register_function` adds stands in all of them.

XNNPACK, as ExecuTorch's quantizer annotates it: products, sums and concatenations, in and out.

A sum or a product of two tensors and the ReLU after it are one operator. Attention and softmax stay in float. A mean
has the quantizers of what it reads and of what reads it: behind it alone, the sum in front would stay in float.

TensorRT with explicit quantization: the inputs of layers that have kernels for INT8 and FP8, as late as possible.

A convolution, its batch normalisation, the residual sum after it and the ReLU are one kernel. A quantizer between them
keeps them apart, so that a residual sum has one on the identity branch alone. Softmax, sigmoid and norms stay in float.

ONNX Runtime: `quantization/registry.py` and the selectors of its optimiser for QuantizeLinear and DequantizeLinear.

A convolution, and a linear layer with a bias, is an integer one only if its result is quantized, too. A ReLU after it
is part of it where the quantizer behind the ReLU is asymmetric: its zero point is the smallest code then. Quantizers
move back to a product over functions that give one tensor another shape (`qdq_propagation.cc`), but over no Split,
Gather, Slice or Resize.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fakequant.errors import ConfigError, nearest
from fakequant.model.run.recorded import having
from fakequant.nn.functions import SITE_FUNCTIONS, Trait


class FixedRange(NamedTuple):
    """A range that an engine gives the result of a function, whatever the data.

    Attributes:
        low: the smallest value.
        high: the largest value, or, where it has no code, the end of the range.
        has_high: whether the largest value has a code: 255 steps of 8 bits from 0 to 1, otherwise 256.
    """

    low: float
    high: float
    has_high: bool


@dataclass(frozen=True)
class Target:
    """The placement rules of one engine, by the canonical names of functions.

    Attributes:
        name: of the engine.
        inputs: functions whose operands are quantized. Layers count by the function that they call.
        keeps: functions whose result has the scale of their input, so that they need no quantizer.
        shared: functions whose operands have one scale together.
        fixed: functions whose result has a range of its own, whatever the data.
        outputs: functions whose result is quantized where no operand of another function quantizes it.
        fused: pairs of functions that are computed as one where nothing else uses what is in between.
        identity_only: whether a sum of a product's result and a residual branch is quantized on that branch alone,
            because the engine computes it together with the product.
        moved_back: functions over which the engine moves a quantizer back to a result that nothing else reads; None if
            over all that `keeps` names.
        attention_in_parts: whether the engine computes attention as two products and a softmax, so that the
            probabilities are quantized, too.
        symmetric: whether activations must be symmetric so that all products are integer ones; False where they must be
            asymmetric, None where both are.
        folds_norms: whether the engine folds a batch normalisation into a product with a quantized weight.

    Raises:
        ConfigError: a function is unknown.

    >>> Target("mine", inputs=frozenset({"linear", "conv2d"}), keeps=frozenset({"relu"})).symmetric is None
    True
    """

    name: str
    inputs: frozenset[str]
    keeps: frozenset[str]
    shared: frozenset[str] = frozenset()
    fixed: dict[str, FixedRange] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    fused: frozenset[tuple[str, str]] = frozenset()
    identity_only: bool = False
    moved_back: frozenset[str] | None = None
    attention_in_parts: bool = False
    symmetric: bool | None = None
    folds_norms: bool = True

    def __repr__(self) -> str:
        return f"Target({self.name!r}, {len(self.inputs)} functions with quantized operands)"

    def __post_init__(self) -> None:
        known = {*SITE_FUNCTIONS, *RECURRENT, ATTENTION_LAYER}
        for name in (*self.inputs, *self.shared, *self.fixed, *self.outputs):
            if name not in known:
                raise ConfigError(f"the target {self.name} names an unknown function {name!r}{nearest(name, [*known])}")


POOLS = frozenset(f"{kind}_pool{n}d" for kind in ("avg", "adaptive_avg") for n in (1, 2, 3))
ATTENTION = frozenset({"scaled_dot_product_attention"})
ATTENTION_LAYER = "multi_head_attention_forward"
"""What `nn.MultiheadAttention` calls: its projections, both products and the softmax in one function."""
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""What the recurrent layers call, for a whole sequence."""


def moves() -> frozenset[str]:
    """Functions that move or pick values."""
    return having(Trait.MOVES)


def products() -> frozenset[str]:
    """Products in one function, which all engines quantize alike."""
    return (having(Trait.PRODUCT) & frozenset(SITE_FUNCTIONS)) - having(Trait.ATTENTION) - lookups()


def lookups() -> frozenset[str]:
    """Functions that read rows of a quantized table."""
    return having(Trait.LOOKUP) & frozenset(SITE_FUNCTIONS)


def after_products(*functions: str) -> frozenset[tuple[str, str]]:
    """Pairs of every product and the functions that engines compute together with it, and of batch normalisation."""
    return frozenset((first, second) for first in (*products(), "batch_norm") for second in ("batch_norm", *functions))


_PRODUCTS = frozenset({"linear", "conv1d", "conv2d", "conv_transpose2d", "addmm"})


def xnnpack() -> Target:
    """The table of XNNPACK."""
    return Target(
        name="xnnpack",
        inputs=_PRODUCTS | {"add", "mul", "cat"},
        keeps=moves() | {"relu", "hardtanh", "relu6"},
        shared=frozenset({"cat"}),
        outputs=_PRODUCTS | {"add", "mul", "cat"},
        fused=after_products("relu", "relu6", "hardtanh") | {("add", "relu"), ("mul", "relu")},
    )


def tensorrt() -> Target:
    """The table of TensorRT."""
    return Target(
        name="tensorrt",
        inputs=products() | ATTENTION | POOLS | {"add"},
        keeps=moves() | {"relu", "cat"},
        fused=after_products("relu", "relu6", "hardtanh", "leaky_relu", "sigmoid", "silu") | {("add", "relu")},
        identity_only=True,
        symmetric=True,
    )


def openvino() -> Target:
    """The table of OpenVINO."""
    return Target(
        name="openvino",
        inputs=products()
        | lookups()
        | ATTENTION
        | {"add", "mul", "cat", "stack", "layer_norm", "group_norm", "instance_norm", "rms_norm", "interpolate", "mean"}
        | POOLS,
        keeps=moves() | {"maximum", "minimum"},
        shared=frozenset({"cat", "stack"}),
        fused=after_products("relu", "relu6", "hardtanh", "leaky_relu", "sigmoid", "silu", "gelu", "hardswish")
        | {("add", "relu")},
    )


_ZERO_TO_ONE = FixedRange(0.0, 1.0, has_high=True)


def qnn() -> Target:
    """The table of QNN."""
    keeps = moves() | {"maximum", "minimum"}
    inputs = frozenset(SITE_FUNCTIONS) - keeps - {"batch_norm", "relu", "relu6", "hardtanh"}
    return Target(
        name="qnn",
        inputs=inputs,
        keeps=keeps,
        shared=frozenset({"cat", "stack"}),
        fixed={
            "softmax": _ZERO_TO_ONE,
            "sigmoid": _ZERO_TO_ONE,
            "hardsigmoid": _ZERO_TO_ONE,
            "tanh": FixedRange(-1.0, 1.0, has_high=True),
        },
        outputs=(inputs | RECURRENT | {ATTENTION_LAYER}) - lookups(),
        fused=after_products("relu", "relu6", "hardtanh") | {("add", "relu")},
        attention_in_parts=True,
    )


def onnxruntime() -> Target:
    """The table of ONNX Runtime."""
    return Target(
        name="onnxruntime",
        inputs=products()
        | lookups()
        | POOLS
        | {"scaled_dot_product_attention", "add", "mul", "cat", "stack", "softmax", "sigmoid", "leaky_relu"},
        keeps=moves() | {"interpolate", "relu", "relu6"},
        fixed={"softmax": FixedRange(0.0, 1.0, has_high=False)},
        outputs=frozenset({"conv1d", "conv2d", "conv3d", "linear", "addmm", "add", "mul", "cat", ATTENTION_LAYER}),
        fused=after_products("relu", "relu6") | {("add", "relu")},
        moved_back=frozenset(
            """
            view reshape flatten unflatten squeeze unsqueeze permute transpose t contiguous clone detach dropout data
            ravel max_pool1d max_pool2d max_pool3d movedim moveaxis swapaxes swapdims T mT H mH
            """.split()  # noqa: SIM905
        ),
        attention_in_parts=True,
        symmetric=False,
        folds_norms=False,
    )


_TARGETS = {made.__name__: made for made in (onnxruntime, tensorrt, openvino, qnn, xnnpack)}


def targets() -> dict[str, Target]:
    """All targets by name.

    >>> sorted(targets())
    ['onnxruntime', 'openvino', 'qnn', 'tensorrt', 'xnnpack']
    """
    return {name: made() for name, made in _TARGETS.items()}


def find_target(name: str | Target) -> Target:
    """The target of a name; a table is its own.

    Raises:
        ConfigError: there is none; the nearest are offered.
    """
    if isinstance(name, Target):
        return name
    if name not in _TARGETS:
        raise ConfigError(f"unknown target {name!r}{nearest(str(name), sorted(_TARGETS))}")
    return _TARGETS[name]()
