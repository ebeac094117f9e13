"""The execution "qnn": the codes of Qualcomm's HTP, against its emulation and against integers of Python."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.engines import qnn
from fakequant.errors import ConfigError, CoverageWarning
from fakequant.model.engine import known_engines
from fakequant.nn.device import CodeGrid, Computed, DeviceTensor, GridCodes, Kept, Operands, Sums
from tests.support.qnn import CONFIGS, FILE, INSTALLED, NEAR, NETWORKS, calibrated, codes, emulated, ranges_of

RECORD = np.load(FILE)
SMALL = "convolution w8a8"
_MIXED = fq.Config("mixed", (fq.Rule("0", "int8_affine"), fq.Rule("1", "fp8")))


@pytest.mark.parametrize("name", NETWORKS)
def test_codes_are_those_of_the_recorded_emulation(name: str) -> None:
    model, x = calibrated(name, torch.from_numpy(RECORD[f"{name}/ranges"]))
    fq.set_execution(model, "qnn")
    with torch.no_grad():
        found = codes(model, model(x))
    np.testing.assert_array_equal(found.numpy(), RECORD[f"{name}/codes"])


@pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed; the record of its codes is compared above")
@pytest.mark.parametrize("name", [*NETWORKS, *NEAR])
def test_codes_are_those_of_the_emulation(name: str, tmp_path: Path) -> None:
    """Without exception where a rule is exact; else by so much at most."""
    model, x = calibrated(name)
    fq.export_onnx(model, x, path := tmp_path / "model.onnx")
    with torch.no_grad():
        found = codes(model, fq.set_execution(model, "qnn")(x))
    assert (found - codes(model, emulated(path, x))).abs().max() <= NEAR.get(name, 0)


def test_rounding_to_the_nearest_gives_other_codes() -> None:
    """So that the comparison above can fail."""
    model, x = calibrated(SMALL, torch.from_numpy(RECORD[f"{SMALL}/ranges"]))
    assert (codes(model, model(x)).numpy() != RECORD[f"{SMALL}/codes"]).any()


@pytest.mark.parametrize("ratio", [1 / 1000, 1 / 20, 1 / 8.01, 1 / 7.99, 1 / 3, 0.9, 1.0, 2.7, 1070.5 / 2**21])
def test_products_are_shifts_of_integers(ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = torch.randint(-(2**22), 2**22, (4096,), generator=generator).double()
    sums = torch.cat([sums, sums // 2048, torch.tensor([2.0**26, -(2.0**26), 0.0])])
    to, one = (
        CodeGrid(torch.tensor(1.0, dtype=torch.float64), 37, -(2**40), 2**40),
        torch.tensor(1.0, dtype=torch.float64),
    )
    found = qnn.product(Sums(sums, one, one * ratio, -412.6 * ratio * one), to)
    r = float(np.float32(ratio))
    exponent = math.floor(math.log2(1 / r))
    dropped = max(exponent - 3, 0)
    multiplier, shift = math.floor(r * 2.0 ** (exponent + 11) + 0.5), exponent + 11 - dropped
    constant = math.floor(float(np.float32(np.float32(-413) + np.float32(37) / np.float32(r))) + 0.5)
    for one, code in zip(sums.long().tolist(), found.tolist(), strict=True):
        assert ((((one + constant) >> dropped) * multiplier) + (1 << (shift - 1))) >> shift == code


@pytest.mark.parametrize("ratio", [1 / 2300, 1 / 257, 1 / 250, 1 / 31.7, 1.0, 1070.5 / 2**19])
def test_products_of_16_bits_lose_the_last_8_bits_of_their_sums(ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.tensor(1.0, dtype=torch.float64)
    raw = torch.randint(-(2**30), 2**30, (4096,), generator=generator).double()
    zero = one * 40_007 * -93  # the zero point times the sum of the weight's codes
    to = CodeGrid(one, 30_011, -(2**40), 2**40)
    found = qnn.product_of_16_bits(Sums(raw - zero, one, one * ratio, -412.6 * ratio * one, of_zero=zero), to)
    r = float(np.float32(ratio))
    exponent = math.floor(math.log2(1 / r))
    multiplier, shift = math.floor(r * 2.0 ** (exponent + 11) + 0.5), exponent + 11 - 8
    constant = math.floor(np.float32(-413) + np.float32(30_011) / np.float32(r) + np.float32(0.5))
    added = (constant >> 8) - ((int(zero) + 128) >> 8)
    for one_sum, code in zip(raw.long().tolist(), found.tolist(), strict=True):
        assert math.floor(((one_sum >> 8) + added) * multiplier / 2.0**shift + 0.5) == code


def test_biases_at_a_tie_become_even() -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    to = CodeGrid(2.0**-4 * one, 0, 0, 255)
    sums = torch.zeros(4, dtype=torch.float64)
    found = qnn.product(Sums(sums, one, one, torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.float64)), to)
    assert found.tolist() == [0, 32, 32, 64]


@pytest.mark.parametrize(
    ("sign", "ratios", "points", "shift"),
    [
        (1, (0.4, 1.4), (13, 200, 90), 13),
        (1, (4793 / 2**13, 5237 / 2**13), (0, 128, 84), 13),  # the constant is halfway between two multiples of 256
        (1, (0.3, 1.6995), (17, 30, 0), 13),
        (1, (0.3, 1.6996), (17, 30, 0), 12),  # whose sum is 2 in 11 bits
        (-1, (0.4, 1.4), (13, 200, 90), 13),
        (-1, (0.9, 0.7), (0, 128, 84), 14),
    ],
)
def test_sums_are_shifts_of_integers(sign: int, ratios: tuple[float, ...], points: tuple[int, ...], shift: int) -> None:
    a = b = torch.arange(256, dtype=torch.uint8)
    numbers = zip((ratios[0] / 32, ratios[1] / 32, 1 / 32), points, strict=True)
    *grids, to = (CodeGrid(torch.tensor(s, dtype=torch.float64), z, 0, 255) for s, z in numbers)
    to = to._replace(low=-(2**40), high=2**40)
    rule = qnn.add if sign > 0 else qnn.sub
    found = rule(Operands((GridCodes(a[:, None], grids[0]), GridCodes(b[None], grids[1]))), to)
    ma, mb = (
        by * round(float(np.float32(ratio / 32)) * 32 * 2**shift) for by, ratio in zip((1, sign), ratios, strict=True)
    )
    constant = 256 * math.ceil(((points[2] + 0.5) * 2**shift - ma * points[0] - mb * points[1]) / 256 - 0.5)
    wanted = [[(ma * i + mb * j + constant) >> shift for j in range(256)] for i in range(256)]
    assert torch.equal(found, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize(
    ("ratio", "points", "shift"),
    [
        (1 / 61.7, (0, 0, 15), 20),
        (1 / 11.2, (100, 50, 201), 18),
        (1 / 900, (140, 120, 90), 22),
        (1 / 170.8, (249, 144, 246), 21),  # the constant of shift 22 has 17 bits
    ],
)
def test_products_of_tensors_have_a_constant_of_16_bits(ratio: float, points: tuple[int, ...], shift: int) -> None:
    (za, zb, zo), one = points, torch.tensor(1.0, dtype=torch.float64)
    a = torch.arange(256, dtype=torch.uint8)
    x, y = (GridCodes(a, CodeGrid(one, z, 0, 255)) for z in (za, zb))
    to = CodeGrid(one / ratio, zo, 0, 255)
    x = x._replace(stored=a[:, None])
    found = qnn.mul(Operands((x, y)), to)
    r = 1 / float(np.float32(1 / ratio))
    m, middle = round(r * 2**shift), 256 * round((255 - 2 * za) * (255 - 2 * zb) / 512)
    constant = math.floor(((zo + 0.5) * 2**shift + middle * m) / 2**15 + 0.5)
    assert constant < 2**15
    wanted = [[((i - za) * (j - zb) - middle) * m + (constant << 15) >> shift for j in range(256)] for i in range(256)]
    assert torch.equal(found, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize(
    ("bounds", "joined", "least", "most"),
    [((0.0, 50.0), False, 10, 60), ((-10.0, 245.0), True, 0, 255), ((7.0, 300.0), True, 0, 255)],
)
def test_a_bound_at_the_last_code_joins_what_was_stored(
    bounds: tuple[float, float], joined: bool, least: int, most: int
) -> None:
    """The result is rounded once then, and the other bound is lost; otherwise codes are rounded twice."""
    device, one = known_engines()["qnn"].device, torch.tensor(1.0, dtype=torch.float64)
    assert device is not None
    sums, to = torch.arange(-900, 900, dtype=torch.int32)[:, None], CodeGrid(one, 10, 0, 255)
    source = Computed("conv1d", Sums(sums[..., None], one, one / 3, 0 * one), is_whole=True)
    stored = CodeGrid(1.1 * one, 100, 0, 255)
    codes = device.codes(source, stored)
    assert codes is not None
    x = DeviceTensor.of(torch.zeros(sums.shape), GridCodes(codes, stored, source=source), device)
    with torch.no_grad():
        found = device.codes(torch.clamp(x, *bounds).has, to)  # type: ignore[attr-defined]
    assert found is not None
    twice = torch.floor((codes.double() - 100) * float(np.float32(1.1)) + 10.5).clamp(least, most)
    assert torch.equal(found, device.codes(source, to) if joined else twice.to(torch.uint8))  # type: ignore[arg-type]
    assert (found.min(), found.max()) == (least, most)


class Swish(nn.Module):
    """A convolution, and the product of its result and the result's sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        return torch.sigmoid(x) * x


@pytest.mark.parametrize(("other", "merged"), [("", True), ("mul_0.other", False), ("sigmoid_0.input", False)])
def test_a_product_with_a_sigmoid_is_one_function_where_both_read_the_same_codes(other: str, merged: bool) -> None:
    """The sigmoid is not rounded between then; without gradients and with them."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 16, 16)
    model = fq.prepare(Swish().eval(), "int8_affine", x, target="qnn")
    fq.calibrate(model, [x], progress=False)
    found = fq.nn.quantizers(fq.set_execution(model, "qnn"))
    if other:
        found[f"_sites.{other}"].scale.data.mul_(1.01)  # type: ignore[union-attr]
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            product = model.get_submodule("convolution")(x)
            a = found["_sites.mul_0.other"](product)
            gate = found["_sites.sigmoid_0.output"](torch.sigmoid(found["_sites.sigmoid_0.input"](product)))
            assert ((gate * a).has.function == "swish") is merged  # type: ignore[attr-defined]
            result = model(x)
        if merged:
            exact = F.silu(a.as_subclass(Tensor).double()).float()
            assert torch.equal(codes(model, result), codes(model, found["_sites.mul_0.output"](exact)))


@pytest.mark.parametrize("inplace", [False, True])
def test_silu_has_a_quantizer_for_its_sigmoid_where_codes_have_8_bits(inplace: bool) -> None:
    """With 16 bits HTP computes SiLU in float. The gradients are those of the product, also where it overwrites."""
    x = torch.randn(2, 3)
    for name, wanted in (("w8a16", ["input", "output"]), ("w8a8", ["input", "sigmoid", "output"])):
        layers = nn.Sequential(nn.Sigmoid(), nn.SiLU(inplace))
        model = fq.prepare(layers, CONFIGS[name], x, target="qnn")
        found = [key.rpartition(".")[2] for key in fq.nn.quantizers(model) if "silu" in key]
        assert found == [one for one in wanted if one != "input"]  # the sigmoid before has a quantizer
        fq.calibrate(model, [x], progress=False)
        y, exact = (x.clone().requires_grad_() for _ in range(2))
        model(y).sum().backward()
        F.silu(exact.sigmoid()).sum().backward()
        torch.testing.assert_close(y.grad, exact.grad, atol=0.01, rtol=0.0)


@pytest.mark.parametrize(
    ("shape", "window", "units", "first"),
    [
        ((1, 576, 3, 3), (1, 1, 3, 3), 32768, 0),
        ((2, 18, 18, 64), (1, 18, 18, 1), 32768, 0),
        ((1, 197, 64), (1, 197, 1), 32768, 0),
        ((1, 64, 3), (1, 1, 3), 32768, 0),
        ((1, 64, 5), (1, 1, 5), 32767, 0),
        ((2, 9, 64), (1, 9, 1), 32767, 0),
        ((1, 64, 600), (1, 1, 600), 32767, 2),
    ],
)
@pytest.mark.parametrize("ratio", [0.11163829, 0.5786311, 1.5786311])
def test_means_are_shifts_of_integers(
    shape: tuple[int, ...], window: tuple[int, ...], units: int, first: int, ratio: float
) -> None:
    summed, points, one = math.prod(window), (92, 90), torch.tensor(1.0, dtype=torch.float64)
    scale = float(np.float32(ratio * summed))
    sums = torch.arange(0, 255 * summed, max(summed // 50, 1), dtype=torch.float64)
    of_x = CodeGrid(scale * one, points[0], 0, 255)
    stored = GridCodes(sums - (summed - 1) * points[0], of_x)
    found = qnn.mean(Operands((stored,), shape, window), CodeGrid(one, points[1], -(2**40), 2**40))
    mantissa, exponent = math.frexp(float(np.float32(scale) / np.float32(summed)))
    multiplier, shift = math.floor(mantissa * units + 0.5), 15 - exponent
    if units == 32767 and ratio >= 0.5:
        first = shift
    constant = (points[1] << shift) + (1 << shift - 1 if first < shift else 0) - multiplier * summed * points[0]
    wanted = [
        ((one * multiplier + (1 << first >> 1) >> first) - (-constant >> first)) >> (shift - first)
        for one in sums.long().tolist()
    ]
    assert found.tolist() == wanted


class Averaged(nn.Module):
    """The mean over some axes."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(x, dim=self.axes)


@pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed; integers of Python are compared above")
@pytest.mark.parametrize(
    ("before", "axes", "shape"),
    [
        ([nn.Conv2d(3, 512, 1)], (2, 3), (1, 3, 3, 3)),
        ([nn.Linear(16, 512)], (1,), (2, 3, 16)),
    ],
)
def test_means_are_those_of_the_emulation(
    before: list[nn.Module], axes: tuple[int, ...], shape: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = fq.prepare(nn.Sequential(*copy.deepcopy(before), Averaged(*axes)).eval(), "int8_affine", x, target="qnn")
    fq.calibrate(model, [x], progress=False)
    with torch.no_grad():
        x = next(q for q in fq.nn.quantizers(model).values() if q.kind is fq.nn.Kind.INPUT)(x).clone()
        found = codes(model, fq.set_execution(model, "qnn")(x))
    fq.export_onnx(fq.set_execution(model, "simulate"), x, path := tmp_path / "model.onnx")
    assert torch.equal(found, codes(model, emulated(path, x)))


def test_sums_of_16_bits_have_an_even_constant() -> None:
    a, b = (torch.arange(start, 65_536, 257, dtype=torch.int32) for start in (3, 11))
    grids = [CodeGrid(torch.tensor(s, dtype=torch.float64), z, 0, 65_535) for s, z in ((0.25, 13_001), (0.875, 50_002))]
    to = CodeGrid(torch.tensor(1.0, dtype=torch.float64), 90, -(2**40), 2**40)
    found = qnn.add_of_16_bits(Operands((GridCodes(a[:, None], grids[0]), GridCodes(b[None], grids[1]))), to)
    ma, mb = round(0.25 * 2**15), round(0.875 * 2**15)
    constant = 2 * math.ceil((90 * 2**15 + 2**14 - ma * 13_001 - mb * 50_002) / 2)
    wanted = [[(ma * i + mb * j + constant) >> 15 for j in b.tolist()] for i in a.tolist()]
    assert torch.equal(found, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("shapes", [((5, 8), (8, 3)), ((2, 5, 8), (8, 3)), ((2, 5, 8), (2, 8, 3)), ((5, 8), (8,))])
def test_products_with_weights_of_any_axes_have_the_codes_of_their_matrices(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    """Of 16 bits: the zero point's share is that of each matrix. A vector has no rule."""
    torch.manual_seed(0)
    of_x, of_weight = shapes
    weight, x = torch.randint(-127, 128, of_weight, dtype=torch.int32), torch.randint(65_536, of_x, dtype=torch.int32)
    one = torch.tensor(1.0, dtype=torch.float64)
    device, to = known_engines()["qnn"].device, CodeGrid(3000 * one, 30_000, 0, 65_535)
    assert device is not None
    grids = CodeGrid(one, 40_001, 0, 65_535), CodeGrid(one, 0, -127, 127)

    def product(x: Tensor, weight: Tensor) -> Tensor | None:
        pairs = zip((x, weight), grids, (None, Kept()), strict=True)
        a, b = (DeviceTensor.of(c.float(), GridCodes(c, grid, kept), device) for c, grid, kept in pairs)
        with torch.no_grad():
            result = torch.matmul(a, b)
        return device.codes(result.has, to) if isinstance(result, DeviceTensor) else None  # type: ignore[arg-type]

    found = product(x, weight)
    if weight.dim() == 1:
        assert found is None
    elif weight.dim() == 2:
        assert found is not None
        assert torch.equal(found.flatten(0, -2), product(x.flatten(0, -2), weight))
    else:
        assert torch.equal(found, torch.stack([product(*pair) for pair in zip(x, weight, strict=True)]))


def test_results_of_another_width_than_their_inputs_have_no_rule() -> None:
    grid = CodeGrid(torch.tensor(0.5, dtype=torch.float64), 3, 0, 255)
    wide = grid._replace(high=65_535)
    narrow, other = (
        GridCodes(torch.zeros(2, dtype=torch.uint8), grid),
        GridCodes(torch.zeros(2, dtype=torch.int32), wide),
    )
    device = known_engines()["qnn"].device
    assert device is not None
    for tensors, to, has_rule in (
        ((narrow, narrow), grid, True),
        ((other, other), wide, True),
        ((narrow, narrow), wide, False),
        ((other, other), grid, False),
    ):
        assert (device.codes(Computed("add", Operands(tensors), is_whole=True), to) is not None) == has_rule


def test_bounds_in_a_row_hold_together() -> None:
    model, x = calibrated(SMALL)
    product = fq.set_execution(model, "qnn").get_submodule("0")(x)
    bounded = nn.functional.hardtanh(product.relu(), -1.0, 0.5)
    assert (bounded.has.least, bounded.has.most) == (0.0, 0.5)  # type: ignore[attr-defined]
    assert nn.functional.hardtanh(bounded, 0.7, 0.9).has.least == 0.5  # type: ignore[attr-defined]


def test_gradients_are_those_of_the_simulation() -> None:
    model, x = calibrated(SMALL)
    gradients = []
    for execution in ("simulate", "qnn"):
        twin = fq.set_execution(copy.deepcopy(model), execution)
        (twin(x) * torch.linspace(-1, 1, 256).reshape(16, 16)).sum().backward()
        gradients.append([p.grad for p in twin.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]
    assert all(g.any() for g in gradients[0])  # type: ignore[union-attr]


def test_training_against_the_device() -> None:
    model, x = calibrated("chain w4a8")
    fq.set_execution(model.train(), "qnn")
    wanted = model(x).detach() * 0.5
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        (loss := (model(x) - wanted).square().mean()).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_file_holds_the_simulation(tmp_path: Path) -> None:
    model, x = calibrated(SMALL)
    fq.export_onnx(model, x, tmp_path / "a.onnx")
    fq.export_onnx(fq.set_execution(model, "qnn"), x, tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_copies_and_pickles_keep_the_device() -> None:
    model, x = calibrated(SMALL)
    wanted = fq.set_execution(model, "qnn")(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), wanted)
    assert isinstance(wanted, DeviceTensor)
    assert "qnn" in str(fq.summary(model))
    assert torch.equal(fq.set_execution(model, "simulate")(x), calibrated(SMALL)[0](x))


def test_what_is_simulated_is_named() -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), _MIXED)
    fq.calibrate(model, [torch.randn(4, 8)], progress=False)
    with pytest.warns(CoverageWarning, match=r'under "qnn" these quantizers are simulated: 1\._'):
        fq.set_execution(model, "qnn")
    with pytest.raises(ConfigError, match='target="qnn"'):
        fq.set_execution(model, "qnn", "1")
    with pytest.raises(ConfigError, match=r"'simulate', 'auto', 'integer', .*'qnn'"):
        fq.set_execution(model, "hexagon")


def test_a_device_of_another_package() -> None:
    """A rule that gives the code 7 for every product."""
    seven = fq.nn.Device("seven", {"product": lambda parts, to: torch.full_like(parts.sums, 7)}, "a test")
    model, x = calibrated(SMALL)
    output = [q for q in fq.nn.quantizers(model).values() if q.kind is fq.nn.Kind.INPUT][-1]
    with torch.no_grad():
        found = fq.set_execution(model, seven)(x)
    assert torch.unique(found).numel() == 1
    assert torch.round(found.flatten()[0] / output.scale) == 7 - (output.zero_point or 0)


def test_recorded_ranges_are_set() -> None:
    ranges = torch.from_numpy(RECORD[f"{SMALL}/ranges"])
    assert torch.equal(ranges_of(calibrated(SMALL, ranges)[0]), ranges)


class Unchanged(nn.Module):
    """Functions that change nothing between a convolution and its quantizer, and a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor, plain: bool = False) -> Tensor:
        y = self.a(x)
        if not plain:
            y = F.dropout(y.clone(), 0.5, self.training).contiguous().detach() if not y.requires_grad else y.clone()
        y = y.relu()
        y += self.c(x)
        return self.b(y)


def test_functions_that_change_nothing_keep_the_codes() -> None:
    """With gradients, too, under which a sum in place is computed on a copy."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    model = fq.prepare(Unchanged().eval(), "int8_affine", x, target="qnn")
    fq.calibrate(model, [x], progress=False)
    simulated = model(x).detach()
    fq.set_execution(model, "qnn")
    with torch.no_grad():
        plain, kept = model(x, True).as_subclass(Tensor), model(x).as_subclass(Tensor)
    assert not torch.equal(plain, simulated)
    assert torch.equal(kept, plain)
    assert torch.equal(model(x).as_subclass(Tensor).detach(), plain)


def test_an_empty_batch_stays_empty() -> None:
    model, x = calibrated("mean w8a8")
    fq.set_execution(model, "qnn")
    assert model(x[:0]).shape[0] == 0


def watched(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The result of a network, and the values of all layers, which are read at once."""
    model, x = calibrated(name)
    fq.set_execution(model, "qnn")
    seen: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, fq.nn.Quantizer):
            layer.register_forward_hook(lambda _, __, y, path=path: seen.update({path: y.as_subclass(Tensor).clone()}))
    with torch.no_grad():
        return model(x).as_subclass(Tensor), seen


@pytest.mark.parametrize("name", NETWORKS)
def test_values_are_the_same_read_at_once_late_or_by_training(name: str) -> None:
    found, seen = watched(name)
    model, x = calibrated(name)
    late: dict[str, Tensor] = {}  # of "written" they are overwritten by the next layer
    for path, layer in fq.set_execution(model, "qnn").named_modules():
        if not isinstance(layer, fq.nn.Quantizer):
            layer.register_forward_hook(lambda _, __, y, path=path: late.update({path: y}))
    with torch.no_grad():
        assert torch.equal(model(x).as_subclass(Tensor), found)
    assert not found.isnan().any()
    for path, values in late.items() if "written" not in name else ():
        assert torch.equal(values.as_subclass(Tensor), seen[path])
    assert torch.equal(model(x).as_subclass(Tensor), found)


def test_values_that_a_quantizer_overwrites_are_not_computed() -> None:
    model, x = calibrated("chain w8a8")
    products: list[Any] = []
    for layer in fq.set_execution(model, "qnn"):  # type: ignore[attr-defined]
        layer.register_forward_hook(lambda _, __, y: products.append(y))
    with torch.no_grad():
        model(x)
    assert len(products) == 8
    assert all(y.late is not None for y in products)
    first = products[1]
    assert (first.shape, first.dtype, first.dim(), len(first)) == ((1, 16, 14, 14), torch.float32, 4, 1)
    assert first.late is not None
    values = first + 0.0
    assert first.late is None
    assert torch.equal(values, first.as_subclass(Tensor))


def test_what_is_overwritten_before_it_is_read() -> None:
    """A result keeps the values of its operand, whatever is written there afterwards."""
    model, x = calibrated(SMALL)
    product = fq.set_execution(model, "qnn").get_submodule("0")
    with torch.no_grad():
        y, twin = product(x), product(x).as_subclass(Tensor).clone()
        rectified, picked, view = y.relu(), F.max_pool2d(y, 2), y.view(16, -1)
        y.mul_(2.0)
        assert torch.equal(y.as_subclass(Tensor), twin * 2)
        assert torch.equal(view.as_subclass(Tensor), twin.view(16, -1) * 2)
        assert torch.equal(rectified.as_subclass(Tensor), twin.relu())
        assert torch.equal(picked.as_subclass(Tensor), F.max_pool2d(twin, 2))
        y = product(x)
        rectified, picked = y.relu(), F.max_pool2d(y, 2)
        y.relu_().copy_(product(x))
        assert torch.equal(y.as_subclass(Tensor), twin)
        assert torch.equal(rectified.as_subclass(Tensor), twin.relu())
        assert torch.equal(picked.as_subclass(Tensor), F.max_pool2d(twin, 2))
        with pytest.raises(RuntimeError, match="must match"):
            y.add_(torch.ones(5))


@pytest.mark.parametrize(
    "name",
    [
        *("chain w4a8", "depthwise w8a8", "linear w8a8", "residual w8a8"),
        *("chain w8a16", "linear w8a16", "residual w4a16", "transposed w8a16"),
    ],
)
def test_what_is_kept_between_calls_follows_changes(name: str) -> None:
    """Of weights, biases, scales and windows: a fresh copy, which keeps nothing, gives the same."""
    model, x = calibrated(name)
    fq.set_execution(model, "qnn")

    def same() -> Tensor:
        with torch.no_grad():
            found, wanted = model(x).as_subclass(Tensor), copy.deepcopy(model)(x).as_subclass(Tensor)
        assert torch.equal(found, wanted)
        return found

    results = [same()]
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear))]
    for layer in layers:
        layer.weight.data.mul_(0.8)
    results.append(same())
    for layer in layers:
        layer.bias.data.add_(0.3)  # type: ignore[union-attr]
    results.append(same())
    for quantizer in fq.nn.quantizers(model).values():
        assert quantizer.scale is not None
        quantizer.scale.data.mul_(1.25)
    results.append(same())
    for quantizer in fq.nn.quantizers(model).values():
        if quantizer.zero_point is not None:
            quantizer.zero_point.data.add_(60)
    results.append(same())
    if not isinstance(layers[0], nn.Linear):
        layers[0].dilation = (2, 2)
        results.append(same())
        x = x[..., :-3]
        results.append(same())
    assert all(a.shape != b.shape or not torch.equal(a, b) for a, b in itertools.pairwise(results))


def test_nan_of_a_bias_or_an_input_stays() -> None:
    model, x = calibrated("chain w8a8")
    fq.set_execution(model, "qnn")
    with torch.no_grad():
        model[4].bias[3] = math.nan  # type: ignore[index]
        assert model(x).isnan().all()
        model, x = calibrated("chain w8a8")
        x[0, 0, 0, 0] = math.nan
        found = fq.set_execution(model, "qnn")(x).isnan()
    assert found[0, :, 0, 0].all()
    assert not found[0, :, 1:, 1:].any()


def test_hooks_and_own_forwards_of_quantizers_are_called() -> None:
    model, x = calibrated(SMALL)
    fq.set_execution(model, "qnn")
    quantizer = next(iter(fq.nn.quantizers(model).values()))
    quantizer.register_forward_hook(lambda *given: torch.zeros_like(given[2]))
    with torch.no_grad():
        assert torch.equal(model(x), model(x * 0))


class Written(nn.Module):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.a, self.b, self.change = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), change

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.change(self.a(x), x))


@pytest.mark.parametrize("target", ["qnn", "xnnpack", "litert"])
@pytest.mark.parametrize(
    ("write", "change"),
    [
        (lambda y, x: y.clamp_(-1, 1), lambda y, x: y.clamp(-1, 1)),
        (lambda y, x: F.hardswish(y, inplace=True), lambda y, x: F.hardswish(y)),
        (lambda y, x: y.sub_(x), lambda y, x: y - x),
        (lambda y, x: y.mul_(2), lambda y, x: y * 2),
        (lambda y, x: (y + x).add_(1), lambda y, x: (y + x) + 1),
    ],
    ids=["clamp", "hardswish", "sub", "mul", "add"],
)
def test_a_model_may_write_to_a_result_of_the_device_while_it_trains(write: Any, change: Any, target: str) -> None:
    found = []
    for own in (write, change):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 6, 6)
        model = fq.prepare(Written(own).eval(), "int8_affine", x, target=target)
        fq.calibrate(model, [x], progress=False)
        fq.set_execution(model, target)
        y = model(x)
        y.square().sum().backward()
        found.append([y, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("read", [F.relu, lambda y: y.mean((2, 3), keepdim=True), lambda y: y.flip(1)])
@pytest.mark.parametrize(
    "write",
    [
        lambda y: y[:, 0].fill_(3.0),
        lambda y: y.view(2, 4, 36)[:, 0].fill_(3.0),
        lambda y: y.detach()[:, 0].fill_(3.0),
        lambda y: y.unbind(1)[0].fill_(3.0),
    ],
    ids=["rows", "view", "detach", "unbind"],
)
@pytest.mark.parametrize("grads", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("target", ["qnn", "xnnpack", "litert"])
def test_the_codes_of_a_result_end_where_a_view_of_it_is_written(
    target: str, grads: Any, write: Any, read: Any
) -> None:
    here, found = torch.tensor([True, False, False, False])[:, None, None], []
    for own in (write, lambda y: y.masked_fill_(here, 3.0)):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 6, 6)

        def change(y: Tensor, x: Tensor, own: Any = own) -> Tensor:
            y = y + x
            own(y)
            return read(y)

        model = fq.prepare(Written(change).eval(), "int8_affine", x, target=target)
        fq.calibrate(model, [x], progress=False)
        with grads():
            found.append(fq.set_execution(model, target)(x))
    assert torch.equal(*found)
