import copy
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakequant.errors import GraphError
from fakequant.ir.op import Ref, items_to_text, to_text

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


@settings(max_examples=100, deadline=None, derandomize=True)
@example(math.nan, math.nan)
@example(0.0, -0.0)
@example([1], [True])
@example("none", None)
@example("[1]", [1])
@given(VALUES, VALUES)
def test_values_have_one_text_where_they_are_the_same(a, b):
    assert to_text(a) == to_text(copy.deepcopy(a))
    assert to_text(a) == to_text(b) if repr(a) == repr(b) else (to_text(a) != to_text(b))


def test_attributes_stand_in_the_order_of_their_names():
    assert items_to_text({"b": [1, Ref(0)], "a": 2.0}) == " {a=2.0, b=[1, %0]}"
    assert items_to_text({}) == ""


def test_other_values_are_refused():
    with pytest.raises(GraphError, match="an attribute cannot be"):
        to_text(object())
    with pytest.raises(GraphError, match="an attribute cannot have the name 'a b'"):
        items_to_text({"a b": 1})
