import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakequant.errors import GraphError
from fakequant.ir.attributes import Reader, Ref, items_to_text, same, to_text

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(),
    st.text(),
    st.integers(0, 99).map(Ref),
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex128]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.strided, torch.channels_last]),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@example({"inf": None, "nan": math.inf, "true": False, "device": "", "none": None})
@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_text_is_read_back_as_the_same_attributes(attributes):
    reader = Reader(items_to_text(attributes) + " : Float32")
    again = reader.attributes()
    assert again.keys() == attributes.keys()
    assert all(same(again[name], value) for name, value in attributes.items())
    assert items_to_text(again) == items_to_text(attributes)
    assert reader.rest == " : Float32"


def test_same_tells_types_and_signs_apart():
    assert same(math.nan, math.nan)
    assert not same(0.0, -0.0)
    assert not same(1, True)
    assert not same([1], [1, 2])


@pytest.mark.parametrize(
    "text",
    [
        "{a=}",
        "{a=1",
        "{=1}",
        "{a=1, a=2}",
        "{a=[1, }",
        "{a=foo}",
        '{a="x}',
        "{a=device(moon)}",
        "{a=layout(x)}",
        "{a 1}",
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(GraphError):
        Reader(text).attributes()


def test_other_values_are_refused():
    with pytest.raises(GraphError, match="an attribute cannot be"):
        to_text(object())
