"""Interfaces of other libraries are edges: no kernel, autograd function, operator or format of their own."""

import ast
from pathlib import Path

import pytest

import fakequant as fq
from fakequant.numerics.formats import formats

COMPAT = Path(fq.__file__).parent / "compat"
# What makes an autograd function or an operator, and what compiles or loads a kernel.
MAKERS = {
    "Function": "an autograd function",
    "custom_op": "an operator",
    "library": "an operator",
    "register_autograd": "an operator",
    "register_fake": "an operator",
    "load_library": "a kernel",
    "cpp_extension": "a kernel",
    "triton": "a kernel",
    "numba": "a kernel",
    "ctypes": "a kernel",
}
# The ends of every format, by which code would know one; those of few bits are numbers that also count other things.
ENDS = {abs(end) for fmt in formats().values() for end in (fmt.quant_min, fmt.quant_max)} - set(range(17))


def thick(source, path):
    """What an edge may not have: 'file:line: what'."""
    tree = ast.parse(source)
    made = [(node, name) for node in ast.walk(tree) for name in names(node) if name in MAKERS]
    if any(imports_the_core(node) for node in ast.walk(tree)):
        made = [(node, name) for node, name in made if not (isinstance(node, ast.Name) and name == "library")]
    ends = [(node, number(node)) for node in constants(tree) if abs(number(node)) in ENDS]
    return sorted(
        {f"{path}:{node.lineno}: {MAKERS[name]} ({name})" for node, name in made}
        | {f"{path}:{node.lineno}: the end of a format ({end:g})" for node, end in ends}
    )


def names(node):
    """The names that a node of the tree reads or imports."""
    if isinstance(node, ast.Import | ast.ImportFrom) and not imports_the_core(node):
        module = getattr(node, "module", None) or ""
        return [part for alias in node.names for part in f"{module}.{alias.name}".split(".")]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def imports_the_core(node):
    """`from fakequant.ops import library`, alone in its statement: the operator that edges call."""
    return ast.unparse(node) == "from fakequant.ops import library" if isinstance(node, ast.ImportFrom) else False


def constants(tree):
    """The largest expressions of literals alone that are numbers; defaults of parameters are the interface's."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if number(node) is not None:
            yield node
            continue
        defaults = [*node.defaults, *node.kw_defaults] if isinstance(node, ast.arguments) else []
        waiting += [child for child in ast.iter_child_nodes(node) if child not in defaults]


def number(node):
    """The number that an expression of literals stands for, or None."""
    of_literals = ast.Constant | ast.UnaryOp | ast.BinOp | ast.operator | ast.unaryop
    if not isinstance(node, ast.expr) or not all(isinstance(leaf, of_literals) for leaf in ast.walk(node)):
        return None
    found = eval(compile(ast.Expression(node), "", "eval"))
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def sources():
    return {path.relative_to(COMPAT): path.read_text() for path in sorted(COMPAT.rglob("*.py"))}


def test_interfaces_are_thin():
    assert len(sources()) > 15
    assert [wrong for path, source in sources().items() for wrong in thick(source, path)] == []


def test_the_folder_holds_nothing_but_python():
    files = [path for path in COMPAT.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} == {".py"}


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("class Quantize(torch.autograd.Function): pass", "an autograd function (Function)"),
        ("from torch.autograd import Function", "an autograd function (Function)"),
        ("from torch.autograd.function import Function as F", "an autograd function (Function)"),
        ("@torch.library.custom_op('a::b', mutates_args=())\ndef f(x): pass", "an operator (custom_op)"),
        ("torch.library.Library('a', 'DEF')", "an operator (library)"),
        ("from torch import library", "an operator (library)"),
        ("from torch.library import custom_op as op", "an operator (library)"),
        ("import triton.language as tl", "a kernel (triton)"),
        ("from torch.utils import cpp_extension", "a kernel (cpp_extension)"),
        ("torch.ops.load_library('a.so')", "a kernel (load_library)"),
        ("bound = 448.0", "the end of a format (448)"),
        ("x.clamp(-127, 127)", "the end of a format (127)"),
        ("y = x.clamp(max=2**7 - 1)", "the end of a format (127)"),
        ("bounds = {'a': [57344]}", "the end of a format (57344)"),
        ("def f(x=1):\n    return 255 - x", "the end of a format (255)"),
    ],
)
def test_what_is_not_thin_is_seen(source, what):
    assert what in {wrong.split(": ", 1)[1] for wrong in thick(source, "x.py")}


@pytest.mark.parametrize(
    "source",
    [
        "from fakequant.ops import library\nlibrary.fake_quantize(x, params, spec)",
        "def fake_quant(x, quant_min: int = 0, quant_max: int = 255): pass",
        "bound = fmt.quant_max",
        "'at most 448'",
        "x.reshape(8, 4)",
    ],
)
def test_what_is_thin_passes(source):
    assert thick(source, "x.py") == []
