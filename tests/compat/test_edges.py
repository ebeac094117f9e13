"""Interfaces of other libraries are edges: no kernel, autograd function, operator or format of their own."""

import ast
from pathlib import Path

import pytest

import fakequant as fq
from fakequant.numerics.formats import formats

COMPAT = Path(fq.__file__).parent / "compat"
# What makes an autograd function or an operator, and what compiles or loads a kernel.
MAKERS = {"Function", "custom_op", "library", "register_autograd", "register_fake"}
MAKERS |= {"load_library", "cpp_extension", "triton", "numba", "ctypes"}
# The ends of every format, by which code would know one; those of few bits are numbers that also count other things.
ENDS = {abs(end) for fmt in formats().values() for end in (fmt.quant_min, fmt.quant_max)} - set(range(17))
# The operator that edges call.
CORE = "from fakequant.ops import library"


def thick(source):
    """What an edge may not have: makers by name, and ends of formats in expressions of literals.

    Defaults of parameters are the interface's.
    """
    found, waiting = [], [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if (value := number(node)) is not None:
            found += [value] if abs(value) in ENDS else []
            continue
        found += [name for name in names(node) if name in MAKERS - ({"library"} if CORE in source else set())]
        defaults = [*node.defaults, *node.kw_defaults] if isinstance(node, ast.arguments) else []
        waiting += [child for child in ast.iter_child_nodes(node) if child not in defaults]
    return found


def names(node):
    """The names that a node of the tree reads or imports."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", None) or ""
        return [part for alias in node.names for part in f"{module}.{alias.name}".split(".")]
    return [getattr(node, "attr", getattr(node, "id", ""))]


def number(node):
    """The number that an expression of literals stands for, or None."""
    of_literals = ast.Constant | ast.UnaryOp | ast.BinOp | ast.operator | ast.unaryop
    if not isinstance(node, ast.expr) or not all(isinstance(leaf, of_literals) for leaf in ast.walk(node)):
        return None
    found = eval(compile(ast.Expression(node), "", "eval"))
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def test_interfaces_are_thin():
    sources = {path: path.read_text() for path in COMPAT.rglob("*.py")}
    assert len(sources) >= 14
    assert {path.name: found for path, source in sources.items() if (found := thick(source))} == {}
    files = [path for path in COMPAT.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} == {".py"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Quantize(torch.autograd.Function): pass", ["Function"]),
        ("from torch.autograd.function import Function as F", ["Function"]),
        ("@torch.library.custom_op('a::b', mutates_args=())\ndef f(x): pass", ["custom_op", "library"]),
        ("from torch import library", ["library"]),
        ("import triton.language as tl", ["triton"]),
        ("torch.ops.load_library('a.so')", ["load_library"]),
        ("x.clamp(-127, 127)", [127, -127]),
        ("y = x.clamp(max=2**7 - 1)", [127]),
        ("bounds = {'a': [57344]}", [57344]),
        ("def f(x=1):\n    return 255 - x", [255]),
        (f"{CORE}\nlibrary.fake_quantize(x, params, spec)", []),
        ("def fake_quant(x, quant_min: int = 0, quant_max: int = 255): pass", []),
        ("bound = fmt.quant_max + len('at most 448') + x.reshape(8, 4)", []),
    ],
)
def test_what_is_not_thin_is_seen(source, found):
    assert thick(source) == found
