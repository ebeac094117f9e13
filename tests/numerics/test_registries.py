"""What every registered format and granularity must do; registering a new one is enough to have it tested here."""

from itertools import product

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.numerics.granularity import Granularity, granularities, parse_granularity
from fakequant.ops.dispatch import backends
from tests.support import matrix
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, SMALL_FORMATS, small_formats

DATA = [name for name, fmt in fq.formats().items() if fmt.has_zero]
# Text forms, by the name that they begin with; every registered granularity needs one.
EXAMPLES = {
    "per_tensor": ["per_tensor"],
    "per_channel": ["per_channel(0)", "per_channel(1)", "per_channel(0,2)"],
    "per_token": ["per_token", "per_token(-3,-1)", "per_token(-2)"],
    "per_block": ["per_block(-1:4)", "per_block(-1:5,pad)", "per_block(0:2,1:3,pad)"],
}


def test_every_granularity_has_an_example() -> None:
    assert set(EXAMPLES) == set(granularities())


def test_every_format_is_known_to_the_oracle() -> None:
    unknown = sorted(set(small_formats()) - set(SMALL_FORMATS))
    assert not unknown, (
        f"{unknown}: floats are found by their names if those are as in ml_dtypes (`small_float` in "
        "tests/support/oracle.py); describe others there, and add them to FORMATS in tests/support/cases.py"
    )


def hostile(fmt: fq.Format) -> torch.Tensor:
    """[4, 6, 8]: random numbers, codes, middles between codes, and what breaks arithmetic."""
    x = torch.randn(4, 6, 8) * fmt.bound
    codes = fmt.clamp(fmt.round(x))
    x[1] = codes[1]
    x[2] = (codes[2] + fmt.clamp(fmt.round(codes[2] * 1.2 + 1))) / 2
    x[3, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 3e38])
    x[3, 1] = 0.0
    return x


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("text", [text for texts in EXAMPLES.values() for text in texts])
def test_backends_and_codes_agree_with_the_reference(name: str, text: str) -> None:
    fmt = fq.parse_format(name)
    granularity: Granularity = parse_granularity(text)
    x = hostile(fmt)
    for arithmetic in (one for one in fq.Arithmetic if fmt.has_zero_point or not one.has_two_scales):
        for gradient in (fq.Gradient.CODE_RANGE, fq.Gradient.INPUT_RANGE):
            spec = fq.QuantSpec(fmt, granularity, arithmetic=arithmetic, gradient=gradient)
            params = fq.choose_qparams(x, spec)
            wanted = reference.fake_quantize(x, params, spec)
            dx = reference.grad_input(torch.ones_like(x), reference.passes(x, params, spec))
            for backend in map(Calls, backends()):
                if backend.unavailable() or backend.unsupported(x, spec, codes=False):
                    continue
                y, mask = backend.fake_quantize(x, params, spec, mask=True)
                assert_same_bits(y, wanted, f"{backend.name} {spec}")
                assert_same_bits(backend.grad_input(torch.ones_like(x), mask, spec, x.stride()), dx, f"mask of {spec}")
        codes, params = fq.quantize(x, spec)
        decoded = fq.dequantize(codes, params, spec)
        known = ~x.isnan()
        assert torch.equal(decoded[known], wanted[known]), f"codes of {spec}"


@pytest.mark.parametrize("name", DATA)
def test_text_comes_back(name: str) -> None:
    for texts in EXAMPLES.values():
        for text in texts:
            spec = fq.QuantSpec(name, parse_granularity(text))
            assert fq.QuantSpec.parse(spec.to_text()) == spec


def test_every_format_runs_and_every_family_of_formats_meets_every_dtype():
    families = {name: (type(case.oracle), case.symmetric) for name, case in FORMATS.items()}
    assert {name for name, _ in matrix.QUICK} == set(FORMATS)
    assert {(families[name], dtype) for name, dtype in matrix.QUICK} == set(product(families.values(), DTYPES))
    assert {name for name, _ in matrix.DYNAMIC_QUICK} == set(matrix.DYNAMIC_FORMATS)
    assert {dtype for _, dtype in matrix.DYNAMIC_QUICK} == set(DTYPES)
