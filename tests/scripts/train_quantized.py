"""A script written for pytorch_quantization, with its public names only; run by tests/compat/test_run.py."""

import argparse

import pytorch_quantization
import torch
import torch.nn.functional as F
from pytorch_quantization import calib, quant_modules
from pytorch_quantization import nn as quant_nn
from pytorch_quantization.optim import helper as optim_helper
from pytorch_quantization.tensor_quant import QuantDescriptor
from pytorch_quantization.utils import quant_logging
from shapes import dataset
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.fc = nn.Linear(8 * 16, 3)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x) + x)
        return self.fc(self.pool(x).flatten(1))


def parse_args():
    parser = argparse.ArgumentParser(description="Quantize, train and export a small network")
    parser.add_argument("output")
    parser.add_argument("--calibrator", choices=["max", "histogram"], default="max")
    parser.add_argument("--method", choices=["entropy", "mse", "percentile"], default="percentile")
    parser.add_argument("--percentile", type=float, default=99.9)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def collect_stats(model, images):
    for module in model.modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.disable_quant()
                module.enable_calib()
            else:
                module.disable()
    with torch.no_grad():
        for batch in images.split(16):
            model(batch)
    for module in model.modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.enable_quant()
                module.disable_calib()
            else:
                module.enable()


def compute_amax(model, **kwargs):
    for name, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                if isinstance(module._calibrator, calib.MaxCalibrator):
                    module.load_calib_amax()
                else:
                    module.load_calib_amax(**kwargs)
            print(f"{name:40}: {module}")


def train(model, images, labels, steps):
    groups = optim_helper.group_parameters(model, [["conv"], ["fc"]], lrs=[0.02, 0.05], momentums=[0.9, 0.0])
    optimizer = torch.optim.SGD(groups, lr=0.01)
    for _ in range(steps):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    args = parse_args()
    quant_logging.reset_logger_handler()
    torch.manual_seed(12345)
    images, labels = dataset(48)

    quant_desc_input = QuantDescriptor(calib_method=args.calibrator)
    for layer in (quant_nn.QuantConv2d, quant_nn.QuantLinear, quant_nn.QuantAdaptiveAvgPool2d):
        layer.set_default_quant_desc_input(quant_desc_input)
    quant_modules.initialize()
    model = Net()
    quant_modules.deactivate()

    collect_stats(model, images)
    compute_amax(model, method=args.method, percentile=args.percentile)
    before = F.cross_entropy(model(images), labels).item()
    after = train(model, images, labels, args.steps)
    print(f"loss {before:.3f} -> {after:.3f}")
    assert after < before

    torch.save(model.state_dict(), f"{args.output}/model.pth")
    restored = Net()
    quant_modules.initialize()
    restored = Net()
    quant_modules.deactivate()
    restored.load_state_dict(torch.load(f"{args.output}/model.pth", map_location="cpu"))
    model.eval()
    restored.eval()
    with torch.no_grad():
        assert torch.equal(model(images), restored(images))

    with pytorch_quantization.enable_onnx_export():
        torch.onnx.export(
            restored,
            images[:2],
            f"{args.output}/model.onnx",
            opset_version=18,
            input_names=["images"],
            output_names=["scores"],
        )
        torch.save(restored(images[:2]), f"{args.output}/scores.pt")
    print("done with", pytorch_quantization.__version__)


if __name__ == "__main__":
    main()
