"""Weights that a `forward` computes from parameters, as adapters do, and masks that only calibration shows."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, CalibrationWarning, CoverageWarning

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
ALL = ["onnxruntime", "openvino", "qnn", "tensorrt", "xnnpack"]


class Adapted(nn.Module):
    """A weight with an update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(8, 8))
        self.a, self.b = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.softmax(self.base + self.a @ self.b, -1))


class Transposed(nn.Module):
    """A weight that a function reads by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


class Scores(nn.Module):
    """An attention written by hand, whose mask is optional."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = x @ x.mT
        scores = scores + (torch.zeros(5, 5) if mask is None else mask)
        return torch.softmax(scores, -1) @ x


@pytest.mark.parametrize("target", ALL)
def test_what_computes_a_weight_from_parameters_has_no_quantizers(target: str) -> None:
    model = fq.prepare(Adapted(), "INT8", example=X, target=target)
    (site,) = fq.site_plan(model).sites
    assert site.path == "_sites.linear_0"
    assert {"input", "weight"} <= set(site.quantizers)


@pytest.mark.parametrize("cls", [Adapted, Transposed])
def test_parameters_of_a_computed_weight_are_not_left_in_float(cls: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CoverageWarning)
        model = fq.prepare(cls(), "INT8", example=X, target="openvino")
    assert fq.unquantized(model, X, products_only=True) == []


def test_a_computed_weight_that_a_rule_leaves_is_told() -> None:
    model = Transposed()
    config = fq.Config("sums", (fq.Rule("*", input="int8", ops=("add",), optional=True),))
    with pytest.warns(CoverageWarning, match="100 % of the parameters stays in float"):
        fq.prepare(model, config, example=X)


@pytest.mark.parametrize("join", [torch.hstack, torch.vstack, torch.dstack, torch.column_stack])
def test_other_names_of_concatenation_share_a_scale(join: object) -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return join((x.relu(), x.sigmoid()))  # type: ignore[operator]

    (site,) = (s for s in fq.site_plan(fq.prepare(Joined(), "INT8", X[0], target="xnnpack")).sites)
    assert site.function == "cat"
    assert len({quantizer.group for quantizer in site.quantizers.values() if quantizer.group}) == 1


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_results_of_recurrent_layers_for_an_engine_that_quantizes_all_results(cell: type[nn.Module]) -> None:
    for target, held in (("qnn", True), ("onnxruntime", False)):
        model = fq.prepare(nn.Sequential(cell(8, 8)), "INT8_AFFINE", example=X, target=target)
        assert (model[0].output_quantizer is not None) is held


def test_a_mask_that_the_example_lacked_is_told() -> None:
    model = fq.prepare(Scores(), "INT8", example=X, target="qnn")
    mask = torch.zeros(5, 5).masked_fill(CAUSAL, -1e9)
    with pytest.warns(CalibrationWarning, match=r"_sites.add_0.other and 1 more reaches -1e\+09.*'add', 'softmax'"):
        fq.calibrate(model, [{"x": X, "mask": mask}])
    with pytest.raises(CalibrationError, match="if an attention mask makes the -inf, give prepare an example with"):
        fq.calibrate(model, [{"x": X, "mask": torch.zeros(5, 5).masked_fill(CAUSAL, -torch.inf)}])
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        masked = fq.prepare(Scores(), "INT8", example={"x": X, "mask": mask}, target="qnn")
        fq.calibrate(masked, [{"x": X, "mask": mask}])
