"""ONNX Runtime. Sources: its `quantization/registry.py`, and its optimiser's selectors for quantize and dequantize.

A convolution, or a linear layer with a bias whose input has two axes, runs on integers only if its result is quantized,
too. With more axes a linear layer is a MatMul whose integer form gives floats (MatMulIntegerToFloat). So sums of a
residual stream that normalisations alone read have no quantizers: in all-MiniLM-L6-v2 the sums after the feed-forward
layers have a few large channels, and the cosine to the float embeddings is 0.861 with their quantizers, and without
0.992 in 1.05 times the time. A ReLU after a product is fused if the quantizer behind the ReLU is asymmetric, because
the zero point is then the smallest code. Quantizers move back to a product over functions that give one tensor another
shape (`qdq_propagation.cc`), but over no Split, Gather, Slice or Resize.
"""

from fakequant.model.engine import WEIGHTS, Engine, register_engine
from fakequant.model.placement import (
    ATTENTION_IN_PARTS,
    ATTENTION_LAYER,
    POOLS,
    FixedRange,
    Target,
    after_products,
    lookups,
    moves,
    products,
)


def placement() -> Target:
    """The placement of quantizers that ONNX Runtime wants."""
    return Target(
        name="onnxruntime",
        inputs=products()
        | lookups()
        | POOLS
        | {"scaled_dot_product_attention", "add", "mul", "cat", "stack", "softmax", "sigmoid", "leaky_relu"},
        keeps=moves() | {"interpolate", "relu", "relu6"},
        fixed={"softmax": FixedRange(0.0, 1.0, has_high=False)},
        outputs=frozenset({"conv1d", "conv2d", "conv3d", "linear", "addmm", "add", "mul", "cat", ATTENTION_LAYER}),
        floats_before=frozenset({"layer_norm", "rms_norm"}),
        fused=after_products("relu", "relu6") | {("add", "relu")},
        moved_back=frozenset(
            """
            view reshape flatten unflatten squeeze unsqueeze permute transpose t contiguous clone detach dropout data
            ravel max_pool1d max_pool2d max_pool3d movedim moveaxis swapaxes swapdims T mT H mH
            """.split()  # noqa: SIM905
        ),
        parts=ATTENTION_IN_PARTS,
        symmetric=False,
        folds_norms=False,
    )


# ONNX Runtime multiplies codes with zero points in every layer; products with scales of tokens were not counted, and
# convolutions with scales of tokens compute in float.
register_engine(
    Engine(
        "onnxruntime",
        "every quantizer bit for bit; products on integers to the code",
        serves="any model, CPUs",
        kinds=(("INT8_AFFINE",), ("INT8_PER_TOKEN",), WEIGHTS),
        files="portable",
        export="export_onnx",
        packages=("onnxruntime",),
        placement=placement,
        page="onnxruntime",
        known="Convolutions run on integers under INT8_AFFINE, and in float under the other presets (1.31.1).",
    )
)
