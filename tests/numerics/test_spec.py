import copy
import dataclasses
import itertools
import json
import pickle

import pytest

import fakequant as fq
from fakequant.errors import SpecError
from fakequant.numerics.spec import _MOST_PARSED, _parsed, as_spec
from tests.support.cases import GRANULARITIES

SPECS = [
    fq.QuantSpec(
        fmt, where.granularity, symmetric=symmetric, arithmetic=arithmetic, gradient=gradient, rounding=rounding
    )
    for (fmt, symmetric), where, arithmetic, gradient, rounding in itertools.product(
        [
            ("int8", True),
            ("int8", False),
            ("uint4", True),
            ("uint4", False),
            ("float8_e5m2", True),
            ("int[-3,9]", True),
        ],
        GRANULARITIES.values(),
        fq.Arithmetic,
        fq.Gradient,
        fq.Rounding,
    )
    if arithmetic.is_linear or (symmetric and not (arithmetic.has_two_scales and "float" in fmt))
]


def test_round_trips():
    for spec in SPECS:
        assert fq.QuantSpec.parse(str(spec)) == spec, str(spec)
        assert fq.QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
        assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
        assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
        assert "_hash" not in spec.__reduce_ex__(4)[2], "a hash of strings is another one in another process"
        assert spec.replace() == spec
    assert len({str(spec) for spec in SPECS}) == len(set(SPECS))


def test_text_names_only_what_differs_from_the_defaults():
    assert str(fq.QuantSpec("int8")) == "int8 per_tensor"
    assert str(fq.QuantSpec("uint8")) == "uint8 per_tensor"
    assert str(fq.QuantSpec("uint8", symmetric=True)) == "uint8 per_tensor symmetric"
    full = fq.QuantSpec(
        "int8", fq.PerChannel(0), symmetric=False, arithmetic=fq.Arithmetic.RECIPROCAL, gradient=fq.Gradient.IDENTITY
    )
    assert str(full) == "int8 per_channel(0) asymmetric reciprocal identity"
    assert str(full.replace(rounding=fq.Rounding.STOCHASTIC)) == f"{full} stochastic"
    mx = fq.QuantSpec.parse("float4_e2m1fn per_block(-1:32) stochastic scale=float8_e8m0fnu:floor")
    assert mx.rounding is fq.Rounding.STOCHASTIC
    assert mx.to_text() == "float4_e2m1fn per_block(-1:32) stochastic scale=float8_e8m0fnu:floor"


@pytest.mark.parametrize(
    ("fmt", "arithmetic", "symmetric"),
    [
        ("int8", fq.Arithmetic.DIVIDE, True),
        ("uint8", fq.Arithmetic.DIVIDE, False),
        ("uint8", fq.Arithmetic.MULTIPLIER, True),
        ("uint8", fq.Arithmetic.Q8_K, True),
        ("float8_e4m3fn", fq.Arithmetic.DIVIDE, True),
    ],
)
def test_symmetric_by_default(fmt, arithmetic, symmetric):
    assert fq.QuantSpec(fmt, arithmetic=arithmetic).symmetric is symmetric


def test_is_a_value():
    spec = fq.QuantSpec("int8")
    with pytest.raises(AttributeError):
        spec.symmetric = False
    assert spec.replace(format="int4") == fq.QuantSpec("int4")
    assert as_spec("int8") == as_spec(spec) == spec
    assert fq.QuantSpec.from_dict({"format": "int8"}) == spec
    assert fq.QuantSpec("int8", rounding="stochastic") == fq.QuantSpec.parse("int8 per_tensor stochastic") != spec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fq.QuantSpec("int9x"), r"unknown format 'int9x'; did you mean int9"),
        (
            lambda: fq.QuantSpec("int8 per_channel(1)"),
            r"unknown format 'int8 per_channel\(1\)'; a text with more than a format is read by "
            r"QuantSpec\.parse\('int8 per_channel\(1\)'\)",
        ),
        (lambda: fq.QuantSpec("int 8"), r"unknown format 'int 8'; did you mean int8"),
        (lambda: fq.QuantSpec("int8", 0), r"granularity must be a Granularity such as PerChannel\(0\), got 0"),
        (lambda: fq.QuantSpec("float8_e5m2", symmetric=False), r"float8_e5m2 has no zero point: symmetric=False is"),
        (
            lambda: fq.QuantSpec("uint8", symmetric=False, arithmetic=fq.Arithmetic.MULTIPLIER),
            r"MULTIPLIER has no zero point; use DIVIDE or RECIPROCAL with symmetric=False",
        ),
        (
            lambda: fq.QuantSpec("uint8", symmetric=False, arithmetic=fq.Arithmetic.Q8_0),
            r"Q8_0 has no zero point; use DIVIDE or RECIPROCAL with symmetric=False",
        ),
        (lambda: fq.QuantSpec.parse("nf4 q8_k"), r"Q8_K is for integers such as int8_narrow, but nf4 is not one"),
        (lambda: fq.QuantSpec.parse("int8 q8_k scale=float16"), r"scales in float16 are for symmetric .* DIVIDE"),
        (lambda: fq.QuantSpec.parse("int8 per_tensor divid"), r"cannot read 'divid' .*did you mean divide"),
        (lambda: fq.QuantSpec.parse("int8 divid"), r"divid"),
        (lambda: fq.QuantSpec.parse("int8 per_tensor stochastik"), r"did you mean stochastic"),
        (lambda: fq.QuantSpec("int8", rounding="up"), r"'up' is not a valid Rounding; expected .* and a Rounding"),
        (lambda: fq.QuantSpec.from_dict({"format": "int8", "rounding": "up"}), r"'up' is not a valid Rounding"),
        (lambda: fq.QuantSpec.parse("int8 divide per_channel(0)"), r"cannot read 'per_channel\(0\)'"),
        (lambda: fq.QuantSpec.parse(""), r"specification"),
        (lambda: fq.QuantSpec.from_dict({"fromat": "int8"}), r"unknown key 'fromat' .*did you mean format"),
        (lambda: fq.QuantSpec.from_dict({"format": "int8", "arithmetic": "x"}), r"cannot read the specification"),
        (lambda: fq.QuantSpec.from_dict({}), r"cannot read the specification"),
    ],
)
def test_errors(make, message):
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("int8 divide reciprocal", "arithmetic was said before"),
        ("int8 per_tensor symmetric asymmetric", "symmetric was said before"),
        ("float4_e2m1fn per_tensor scale=float8_e8m0fnu scale=float8_e8m0fnu", "scale was said before"),
    ],
)
def test_a_text_that_says_something_twice(text, what):
    with pytest.raises(SpecError, match=what):
        fq.QuantSpec.parse(text)


def test_specifications_that_are_read_are_kept_within_bounds():
    first = fq.QuantSpec.parse("int8 per_channel(3)")
    assert fq.QuantSpec.parse("int8 per_channel(3)") is first
    for size in range(1, 3000):
        assert str(fq.QuantSpec.parse(f"int8 per_block(-1:{size})")) == f"int8 per_block(-1:{size})"
    assert len(_parsed) <= _MOST_PARSED
    assert fq.QuantSpec.parse("int8 per_channel(3)") == first


def test_fields_have_no_default_in_the_class():
    """Torch before 2.13 compiles a field that is False as the default that its class has."""
    assert [field.name for field in dataclasses.fields(fq.QuantSpec) if hasattr(fq.QuantSpec, field.name)] == []
