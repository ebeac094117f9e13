"""The nodes of an ONNX graph that quantize: values, scales, ranges of a call, and loops of recurrent layers."""
