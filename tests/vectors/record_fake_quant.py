"""Writes fake_quant.npz: what the FakeQuant and FakeQuantGrad kernels of ONNX Runtime compute.

They are in onnxruntime-training only, which does not live beside onnxruntime. In an environment of its own:

    pip install onnxruntime-training-cpu==1.19.2 onnx==1.17.0
    python tests/vectors/record_fake_quant.py
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

ELEMENTS = 256
# Attributes (none are the defaults 0 and 255), scale, zero point.
CASES = [
    ({}, 0.1, 0.0),
    ({}, 0.1, 101.0),
    ({}, 1 / 3, 255.0),
    ({}, 0.0173, 128.0),
    ({"quant_max": 15}, 0.5, 7.0),
    ({"quant_min": -128}, 0.037, -5.0),
    ({"quant_min": -128, "quant_max": 127}, 0.0173, 0.0),
    ({"quant_min": -128, "quant_max": 127}, 7.7, -7.0),
    ({"quant_min": -127, "quant_max": 127}, 2.0**-9, 0.0),
    ({"quant_min": -8, "quant_max": 7}, 1 / 3, 3.0),
    ({"quant_min": 0, "quant_max": 1}, 123.456, 1.0),
    ({"quant_min": 0, "quant_max": 7500}, 1e-6, 75.0),
    ({"quant_min": -32768, "quant_max": 32767}, 0.001, 12345.0),
    ({"quant_min": 10, "quant_max": 20}, 0.1, 15.0),
    ({"quant_min": -20, "quant_max": -10}, 0.3, -11.0),
    # A zero point that is no code: 0.0 becomes another number.
    ({}, 0.1, 300.0),
    ({}, 0.1, -3.0),
]
EDGES = ({}, 0.1, 3.0)


def session(attributes, functions=()):
    """FakeQuant and FakeQuantGrad in one graph."""
    nodes = [
        helper.make_node(
            "FakeQuant", ["x", "scale", "zero_point"], ["y", "mask"], domain="com.microsoft", **attributes
        ),
        helper.make_node("FakeQuantGrad", ["dy", "mask"], ["dx"], domain="com.microsoft"),
    ]
    inputs = {"x": [None], "scale": [], "zero_point": [], "dy": [None]}
    outputs = {"y": TensorProto.FLOAT, "mask": TensorProto.BOOL, "dx": TensorProto.FLOAT}
    graph = helper.make_graph(
        nodes,
        "fake_quant",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, kind, [None]) for name, kind in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def run(ready, x, dy, scale, zero_point):
    """y, mask and dx."""
    given = {"scale": np.array(scale, np.float32), "zero_point": np.array(zero_point, np.float32)}
    return ready.run(None, {"x": x, "dy": dy, **given})


def numbers(random, attributes, scale, zero_point):
    """Middles between codes and the numbers beside them, others, and small ones."""
    low, high = attributes.get("quant_min", 0), attributes.get("quant_max", 255)
    codes = random.integers(low - 3, high + 4, ELEMENTS // 2) + 0.5 - zero_point
    middles = codes.astype(np.float32) * np.float32(scale)
    beside = random.integers(-1, 2, middles.shape)
    towards = np.where(beside < 0, np.float32(-np.inf), np.float32(np.inf))
    middles = np.where(beside == 0, middles, np.nextafter(middles, towards))
    x = np.concatenate([middles, random.normal(0, (high - low) * scale, ELEMENTS // 2).astype(np.float32)])
    x[:8] = [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1e6, -1e6]
    return x


def prefers_its_kernel():
    """Whether a function of the same name, which does something else, is ignored."""
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Equal", ["x", "x"], ["mask"])]
    opsets = [helper.make_opsetid("", 17)]
    names = ["x", "scale", "zero_point"]
    wrong = helper.make_function("com.microsoft", "FakeQuant", names, ["y", "mask"], nodes, opsets)
    x = np.array([0.3, 99.0], np.float32)
    return all(map(np.array_equal, run(session({}, [wrong]), x, x, 0.1, 0.0), run(session({}), x, x, 0.1, 0.0)))


def main():
    """Record every case, and last what becomes of infinities and NaN."""
    random = np.random.default_rng(0)
    arrays, cases = {}, []
    for number, (attributes, scale, zero_point) in enumerate([*CASES, EDGES]):
        if number < len(CASES):
            x = numbers(random, attributes, scale, zero_point)
            dy = random.normal(0, 1, ELEMENTS).astype(np.float32)
        else:
            x = dy = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32)
        y, mask, dx = run(session(attributes), x, dy, scale, zero_point)
        cases.append({"attributes": attributes, "scale": scale, "zero_point": zero_point})
        arrays |= {f"{number}/{name}": v for name, v in (("x", x), ("dy", dy), ("y", y), ("mask", mask), ("dx", dx))}
    notes = {"onnxruntime": onnxruntime.__version__, "prefers_its_kernel": prefers_its_kernel(), "cases": cases}
    np.savez_compressed(Path(__file__).parent / "fake_quant.npz", notes=json.dumps(notes), **arrays)


if __name__ == "__main__":
    main()
