"""From a float model to a quantized, fine-tuned and exported one, in half a minute on any machine."""

import torch

import fakequant as fq


def network() -> torch.nn.Module:
    """Your model."""
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))


# Your data: batches of inputs and labels.
torch.manual_seed(0)
batches = [(x, (x.sum(1) > 0).long()) for x in torch.randn(8, 64, 8)]

model = fq.prepare(network(), fq.presets.INT8)  # in place: layers become quantized layers
fq.calibrate(model, batches, inputs=0)  # ranges from data; item 0 of a batch is the input
print(fq.summary(model, batches[0], inputs=0))  # what is quantized, and what stays in float
print(fq.sensitivity(model, batches, inputs=0)[0])  # the layer that hurts most

schedule = fq.qat.Schedule(original_lr=0.1, original_epochs=90)  # of your training in float
fq.qat.finetune(model, batches, torch.nn.functional.cross_entropy, schedule)

fq.save(model, "checkpoint")  # fq.load(network(), "checkpoint") restores it
fq.export_onnx(model, batches[0][0], "model.onnx", dynamic_shapes=({0: "batch"},))
print(fq.verify_onnx("model.onnx", model, batches, inputs=0))  # every quantizer in ONNX Runtime, bit for bit
