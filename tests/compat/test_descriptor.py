"""compat.pytorch_quantization descriptors, their text forms, and reduce_amax."""

import copy
import logging
import pickle
import sys

import numpy as np
import pytest
import torch
import yaml

from fakequant.compat.pytorch_quantization import tensor_quant, utils
from fakequant.compat.pytorch_quantization.tensor_quant import QuantDescriptor

DESCRIPTORS = [
    {},
    {"num_bits": 4, "name": "a: \"b\", {c} [d] 'e' #f\n- é", "unsigned": True},
    {"num_bits": (4, 3), "fake_quant": False},
    {"axis": 0},
    {"axis": (0, 2), "narrow_range": True},
    {"axis": (-1,), "calib_method": "histogram"},
    {"amax": 1e-05},
    {"amax": [0.1, 2.0, 1e30]},
    {"amax": np.float32([[[1.0]], [[float("inf")]]]), "scale_amax": 0.5},
    {"learn_amax": True, "amax": 6.0, "dynamic": True},
    {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
    {"block_sizes": {0: 128, 1: 64, "type": "static", "scale_bits": 8, "scale_block_sizes": {-1: 256}}},
]

OPTIONS = ["num_bits", "name", "fake_quant", "axis", "block_sizes", "learn_amax", "scale_amax", "calib_method"]
OPTIONS += ["unsigned", "narrow_range", "dynamic"]


@pytest.mark.parametrize("options", DESCRIPTORS, ids=str)
def test_dict_yaml_copy_and_pickle_give_an_equal_descriptor(options):
    descriptor = QuantDescriptor(**options)
    for other in (
        QuantDescriptor(**descriptor.dict()),
        QuantDescriptor.from_yaml(descriptor.to_yaml()),
        copy.deepcopy(descriptor),
        pickle.loads(pickle.dumps(descriptor)),
    ):
        assert other == descriptor
        for name in OPTIONS:
            ours, theirs = getattr(descriptor, name), getattr(other, name)
            assert (theirs, type(theirs)) == (ours, type(ours))
        if descriptor.amax is None:
            assert other.amax is None
        else:
            assert other.amax.dtype == np.float32
            np.testing.assert_array_equal(other.amax, descriptor.amax)
    assert descriptor.dict().keys() == {"num_bits", "name"} | (options.keys() - {"num_bits", "name"})


def test_all_descriptors_differ():
    made = [QuantDescriptor(**options) for options in DESCRIPTORS]
    assert all((a == b) == (i == j) for i, a in enumerate(made) for j, b in enumerate(made))
    assert QuantDescriptor(amax=[1.0, 2.0]) != QuantDescriptor(amax=[1.0, 3.0])
    assert QuantDescriptor(axis=0) != QuantDescriptor(axis=(0,))
    assert QuantDescriptor() != "QuantDescriptor"


def test_yaml_of_other_writers():
    text = "axis:\n- 0\n- 1\nfake_quant: false\nname: null\nnum_bits: 8\n"
    assert QuantDescriptor.from_yaml(text) == QuantDescriptor(axis=(0, 1), fake_quant=False)
    text = "---\namax:\n- 1.0\n- 2.5\nname: 'it''s'\nnum_bits: !!python/tuple\n- 4\n- 3\n"
    assert QuantDescriptor.from_yaml(text) == QuantDescriptor((4, 3), "it's", amax=[1.0, 2.5])
    text = "{axis: [0, -1], block_sizes: ~, amax: [[.inf], [1.0e-05]]}"
    assert QuantDescriptor.from_yaml(text) == QuantDescriptor(axis=(0, -1), amax=[[float("inf")], [1e-5]])


def test_yaml_is_in_block_style_with_sorted_keys():
    descriptor = QuantDescriptor(num_bits=(4, 3), axis=(0,), amax=[[1e-5], [2.5]], name="é")
    text = 'amax:\n- - 9.999999747378752e-06\n- - 2.5\naxis:\n- 0\nname: "\\xE9"\nnum_bits:\n- 4\n- 3\n'
    assert descriptor.to_yaml() == text


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("num_bits 8", TypeError, "a mapping such as 'num_bits: 8', not 'num_bits 8'"),
        ("- 8", TypeError, r"not \[8\]"),
        ("", TypeError, "not None"),
        ("granularity: 1", TypeError, "Unused keys"),
        ("axis: [0", yaml.YAMLError, "expected ',' or ']'"),
        ("name: !!python/object/apply:os.getcwd []", yaml.YAMLError, "could not determine a constructor"),
    ],
)
def test_yaml_of_no_descriptor(text, error, words):
    with pytest.raises(error, match=words):
        QuantDescriptor.from_yaml(text)


def test_without_pyyaml_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    for call in (QuantDescriptor().to_yaml, lambda: QuantDescriptor.from_yaml("num_bits: 8")):
        with pytest.raises(ModuleNotFoundError, match=r"need PyYAML.*pip install 'fakequant\[compat\]'"):
            call()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "QuantDescriptor(8bit fake axis= per-tensor)"),
        ({"name": "x", "axis": 0, "unsigned": True}, "x: (unsigned 8bit fake axis=0)"),
        ({"fake_quant": False, "amax": 1.5}, "QuantDescriptor(8bit real axis= per-tensor amax=1.5 full_range)"),
        (
            {"learn_amax": True, "scale_amax": 0.5, "num_bits": (4, 3)},
            "QuantDescriptor((4, 3)bit fake axis= per-tensor learn_amax scale_amax=0.5)",
        ),
        ({"block_sizes": {-1: 32}}, "QuantDescriptor(8bit fake axis= per-tensor block_sizes={-1: 32})"),
    ],
)
def test_printed_form(options, text):
    assert str(QuantDescriptor(**options)) == text


def test_the_predefined_descriptors():
    axes = {"PER_TENSOR": None, "LINEAR_WEIGHT_PER_ROW": 0}
    axes |= {f"CONV{d}D_WEIGHT_PER_CHANNEL": 0 for d in (1, 2, 3)}
    axes |= {f"CONVTRANSPOSE{d}D_WEIGHT_PER_CHANNEL": 1 for d in (1, 2, 3)}
    for name, axis in axes.items():
        assert getattr(tensor_quant, f"QUANT_DESC_8BIT_{name}") == QuantDescriptor(num_bits=8, axis=axis)
    assert QuantDescriptor(num_bits=8, unsigned=True) == tensor_quant.QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"granularity": 1, "x": 2}, TypeError, r"Unused keys: \['granularity', 'x'\]; known are fake_quant"),
        ({"num_bits": 8.0}, TypeError, "num_bits must be a positive integer"),
        ({"num_bits": (5, 9)}, TypeError, r"one of the tuples .*\(4, 3\)"),
        ({"num_bits": -1}, ValueError, "num_bits must be > 0, not -1"),
        ({"name": 3}, TypeError, "name must be a string or None"),
        ({"amax": 1}, TypeError, "amax must be float, list or ndarray"),
        ({"amax": torch.tensor(1.0)}, TypeError, "amax must be float, list or ndarray"),
        (
            {"learn_amax": True, "axis": 0},
            TypeError,
            "axis is ignored and must be None when learn_amax is true, got 0; leave axis out",
        ),
        ({"axis": "x"}, TypeError, "axis must be None, an int or a tuple"),
        ({"axis": 0, "block_sizes": {-1: 32}}, ValueError, "axis must be None when block_sizes"),
        ({"block_sizes": {"type": "static"}}, ValueError, "at least one axis"),
        ({"block_sizes": {-1: 0}}, ValueError, "positive size"),
        ({"block_sizes": {-1: 32, "typ": "static"}}, ValueError, "type, scale_bits, scale_block_sizes"),
        ({"block_sizes": {-1: 32, "type": "fast"}}, ValueError, "static or dynamic, not 'fast'"),
        ({"block_sizes": 32}, TypeError, "must be a dict"),
    ],
)
def test_errors(options, error, text):
    with pytest.raises(error, match=text):
        QuantDescriptor(**options)


def test_options_by_position_in_the_order_of_later_releases():
    amax = np.float32([1.0, 2.0])
    by_name = QuantDescriptor(
        num_bits=4,
        name="x",
        fake_quant=False,
        axis=1,
        block_sizes=None,
        amax=amax,
        learn_amax=False,
        scale_amax=0.5,
        calib_method="histogram",
        unsigned=True,
        narrow_range=True,
        dynamic=True,
    )
    values = 4, "x", False, 1, None, amax, False, 0.5, "histogram", True, True, True
    assert QuantDescriptor(*values) == by_name
    assert QuantDescriptor(*values[:4], unsigned=True) == QuantDescriptor(
        4, "x", fake_quant=False, axis=1, unsigned=True
    )
    with pytest.raises(TypeError, match="at most 12 arguments, got 13"):
        QuantDescriptor(*values, False)
    with pytest.raises(TypeError, match=r"by position and by name: \['axis'\]"):
        QuantDescriptor(*values[:4], axis=1)


def test_zero_bits_are_logged(caplog):
    with caplog.at_level(logging.ERROR):
        QuantDescriptor(num_bits=0)
    assert "num_bits is 0" in caplog.text


def test_dynamic_and_blocks():
    assert not QuantDescriptor(block_sizes={-1: 32}).dynamic
    assert QuantDescriptor(block_sizes={-1: 32, "type": "dynamic"}).dynamic
    assert QuantDescriptor(dynamic=True).dynamic
    assert QuantDescriptor.get_block_quant_axes_and_sizes({0: 8, -1: 16, "scale_bits": 8}) == {0: 8, -1: 16}
    assert QuantDescriptor.get_block_quant_axes_and_sizes(None) is None


AXES = [None, 0, -1, (0,), (1, 2), [0, 1, 2], (0, 0), (-1, 1), [], (0, -2)]


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_reduce_amax(axis, keepdims, dtype):
    x = torch.randn(3, 4, 5).mul(50).abs().to(dtype) if dtype == torch.uint8 else torch.randn(3, 4, 5).mul(50).to(dtype)
    wanted = x.abs()
    if axis is None:
        wanted = wanted.max()
    elif isinstance(axis, int):
        wanted = wanted.max(axis, keepdim=keepdims)[0]
    else:
        for each in axis:
            wanted = wanted.max(each, keepdim=True)[0]
        wanted = wanted if keepdims and wanted.numel() > 1 else wanted.squeeze()
    amax = utils.reduce_amax(x, axis, keepdims)
    assert amax.dtype == dtype
    assert amax.shape == wanted.shape
    assert torch.equal(amax, wanted)


def test_reduce_amax_of_unusual_tensors():
    for zeros in ([-0.0, -0.0], [0.0, 0.0], [0.0, -0.0], [-0.0, 0.0]):
        assert not torch.signbit(utils.reduce_amax(torch.tensor(zeros)))
    assert utils.reduce_amax(torch.tensor([1.0, torch.nan])).isnan()
    assert utils.reduce_amax(torch.tensor([[1.0, -torch.inf]]), 1).item() == torch.inf
    assert utils.reduce_amax(torch.tensor(-2.0)) == utils.reduce_amax(torch.tensor(-2.0), 0) == 2
    assert not utils.reduce_amax(torch.ones(2, requires_grad=True)).requires_grad
    with pytest.raises(ValueError, match="Cannot reduce more axes than tensor's dim"):
        utils.reduce_amax(torch.ones(2), (0, 0))
    with pytest.raises(IndexError, match="axis 1 is out of range"):
        utils.reduce_amax(torch.ones(2), 1)
    with pytest.raises(RuntimeError, match="no largest magnitude"):
        utils.reduce_amax(torch.ones(0))


def test_reset_logger_handler():
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        root.addHandler(logging.NullHandler())
        utils.quant_logging.reset_logger_handler()
        assert not root.handlers
    finally:
        root.handlers[:] = handlers
