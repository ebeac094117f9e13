"""Runs ONNX Runtime's quantized operators in small models."""

import numpy as np
import onnxruntime
import torch

LEVELS = {
    "as it is": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "optimised": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def run(model, *values, level="optimised"):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {given.name: np.asarray(v) for given, v in zip(session.get_inputs(), values, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]
