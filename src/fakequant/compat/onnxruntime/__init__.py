"""ONNX Runtime's training operators FakeQuant and FakeQuantGrad, for tensors and in the public onnxruntime wheel.

y = (clamp(rint(x / scale) + zero_point) - zero_point) * scale, and a mask that is true where the code was in range
before it was clamped; docs/notes/differences.md lists what differs from the kernels.

Source: microsoft/onnxruntime, orttraining/training_ops/{cpu,cuda}/quantization/fake_quant*.
"""

from fakequant.compat.onnxruntime.export import export_fake_quant
from fakequant.compat.onnxruntime.functions import attach_functions
from fakequant.compat.onnxruntime.operators import fake_quant, fake_quant_grad

__all__ = ["attach_functions", "export_fake_quant", "fake_quant", "fake_quant_grad"]
