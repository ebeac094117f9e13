"""A quantized model as files, and back."""
