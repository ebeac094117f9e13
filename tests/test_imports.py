"""Imports point one way and close no circle, optional packages stay optional, no format's name decides anything."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch import nn

import fakequant as fq

PACKAGE = Path(fq.__file__).parent

# Rooms from the innermost to the outermost; those of one set do not import each other.
ROOMS = [
    {"errors", "memory", "offload", "registry", "text", "version"},
    {"distributed", "files", "restore"},
    {"numerics"},
    {"ops"},
    {"functional"},
    {"calibration"},
    {"nn"},
    {"data"},
    {"model"},
    {"ptq"},
    {"export"},
    {"delivery", "engines"},
    {"streaming"},
    {"ir"},
    {"report"},
    {"plot", "presets", "qat"},
    {"compat", "integrations"},
    {"cli"},
]
# The package's own __init__ and its __main__ import from every room.
UNRANKED = {"__init__", "__main__"}

# Where formats are named and their names are read.
FORMATS = Path("numerics/formats")

OPTIONAL = {
    "accelerate",
    "compressed_tensors",
    "gguf",
    "lightning",
    "matplotlib",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "rich",
    "safetensors",
    "sklearn",
    "tqdm",
    "transformers",
    "triton",
    "typer",
    "yaml",
}


def rank(room):
    return next((place for place, rooms in enumerate(ROOMS) if room in rooms), None)


@cache
def nodes(source):
    """All nodes of a source; several of these tests walk them."""
    return tuple(ast.walk(ast.parse(source)))


def imported_modules(nodes, module):
    """(line, full dotted name) of every import in a module, relative ones resolved; module is a tuple of names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(module[: len(module) - node.level]) if node.level else ""
            base = ".".join(part for part in (start, node.module) if part)
            yield node.lineno, base
            # `from fakequant import nn` imports a room by its name.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names if base == "fakequant")


def wrong_imports(source, path):
    """Imports of a later room, or of another room of the same rank: 'file:line: room imports room'."""
    module = ("fakequant", *path.with_suffix("").parts)
    room = module[1]
    if room in UNRANKED:
        return []
    if rank(room) is None:
        return [f"{path}:1: room {room!r} has no place in the order of imports"]
    found = set()
    for line, name in imported_modules(nodes(source), module):
        parts = name.split(".")
        if parts[0] in ("examples", "benchmarks", "tests"):
            found.add(f"{path}:{line}: {room} imports {parts[0]}, which no wheel has")
        if parts[0] != "fakequant" or len(parts) < 2 or rank(parts[1]) is None or parts[1] == room:
            continue
        if rank(parts[1]) >= rank(room):
            found.add(f"{path}:{line}: {room} imports {parts[1]}")
    return sorted(found)


def imports_inside(modules):
    """The modules of the package that each of its modules imports, by dotted name; modules is {path: source}."""
    names = {path: ("fakequant", *path.with_suffix("").parts) for path in modules}
    dotted = {path: ".".join(name[:-1] if name[-1] == "__init__" else name) for path, name in names.items()}
    known = set(dotted.values())
    found = {}
    for path, source in modules.items():
        targets = set()
        for node in nodes(source):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                start = ".".join(names[path][: len(names[path]) - node.level]) if node.level else ""
                base = ".".join(part for part in (start, node.module) if part)
                members = {f"{base}.{alias.name}" for alias in node.names}
                targets.update(member if member in known else base for member in members)
        found[dotted[path]] = (targets & known) - {dotted[path]}
    return found


def of_rooms(imports):
    """Imports among the rooms of the package: folders of two levels, and the files beside them."""
    found = {}
    for module, targets in imports.items():
        room = ".".join(module.split(".")[:3])
        found.setdefault(room, set()).update({".".join(target.split(".")[:3]) for target in targets} - {room})
    return found


def circles(imports):
    """The modules that import themselves through others: 'module: the modules of its circle'.

    Every import statement counts, also one inside a function and one under TYPE_CHECKING: to understand the importing
    module a reader must know the imported one. `from package import name` is an import of the module package.name if
    there is one, else of the package's __init__. It does not count that Python runs the __init__ of every package
    above an imported module.
    """
    reached = {module: set() for module in imports}
    for module, seen in reached.items():
        waiting = [module]
        while waiting:
            new = imports[waiting.pop()] - seen
            seen |= new
            waiting += new
    return [
        f"{module}: {', '.join(sorted(other for other in seen if module in reached[other] and other != module))}"
        for module, seen in reached.items()
        if module in seen
    ]


def format_name_branches(source, path):
    """Comparisons with the name of a registered format as a literal: 'file:line'."""
    names = set(fq.formats())
    found = []
    for node in nodes(source):
        operands = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        literals = {leaf.value for operand in operands for leaf in ast.walk(operand) if isinstance(leaf, ast.Constant)}
        found += [
            f"{path}:{node.lineno}: compares with {name!r}" for name in sorted(names & {str(v) for v in literals})
        ]
    return found


LAYERS = {name for name, one in vars(nn).items() if isinstance(one, type) and issubclass(one, nn.Module)}
LAYERS -= {"Module", "ModuleList", "ModuleDict", "Sequential", "ParameterList", "ParameterDict"}


def layer_classes(source, path):
    """Where classes of torch's layers are named: 'file:line: names nn.Class'."""
    named = [node for node in nodes(source) if isinstance(node, ast.Attribute) and node.attr in LAYERS]
    return [
        f"{path}:{one.lineno}: names nn.{one.attr}" for one in named if ast.unparse(one.value) in ("nn", "torch.nn")
    ]


@cache
def sources():
    return [(path.read_text(), path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py"))]


def test_imports_point_one_way():
    assert len(sources()) > 10
    assert not [wrong for source, path in sources() for wrong in wrong_imports(source, path)]


def test_no_module_imports_itself_through_others():
    imports = imports_inside({path: source for source, path in sources()})
    assert circles(imports) == []
    assert circles(of_rooms(imports)) == []


def test_no_branch_on_the_name_of_a_format():
    assert not [
        branch for source, path in sources() if path.parent != FORMATS for branch in format_name_branches(source, path)
    ]


def test_the_room_of_layers_alone_names_their_classes():
    # The old programs that `compat` stands in for are made of subclasses of them.
    others = [(source, path) for source, path in sources() if path.parts[0] not in ("nn", "compat")]
    assert not [found for source, path in others for found in layer_classes(source, path)]
    assert layer_classes("isinstance(x, nn.Linear)", Path("x.py")) == ["x.py:1: names nn.Linear"]
    assert layer_classes("import torch\n\nx: torch.nn.LSTM", Path("x.py")) == ["x.py:3: names nn.LSTM"]


@pytest.mark.parametrize(
    ("source", "path", "wrong"),
    [
        ("from ..ops import library", "numerics/spec.py", "numerics/spec.py:1: numerics imports ops"),
        ("\nfrom fakequant.nn import quantizer", "ops/library.py", "ops/library.py:2: ops imports nn"),
        ("import fakequant.cli", "functional.py", "functional.py:1: functional imports cli"),
        ("from . import functional", "errors.py", "errors.py:1: errors imports functional"),
        ("from fakequant import ir", "export/inputs.py", "export/inputs.py:1: export imports ir"),
        ("def f():\n    from ..model import prepare", "nn/forms.py", "nn/forms.py:2: nn imports model"),
        ("from benchmarks import harness", "cli/x.py", "cli/x.py:1: cli imports benchmarks, which no wheel has"),
        ("x = 1", "leftover/thing.py", "leftover/thing.py:1: room 'leftover' has no place in the order of imports"),
    ],
)
def test_the_import_checker_can_fail(source, path, wrong):
    assert wrong_imports(source, Path(path)) == [wrong]


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("from ..errors import SpecError\nfrom .formats import Format", "numerics/spec.py"),
        ("from fakequant.ops import library\nimport torch", "functional.py"),
        ("from ...numerics import reference", "ops/cpu/backend.py"),
        ("from .nn import layers", "__init__.py"),
    ],
)
def test_the_import_checker_can_pass(source, path):
    assert wrong_imports(source, Path(path)) == []


@pytest.mark.parametrize(
    "back",
    [
        "from .a import f",
        "from fakequant.ir.a import f",
        "import fakequant.ir.a",
        "from . import a",
        "from fakequant.ir import a",
        "def g():\n    from .a import f",
        "if TYPE_CHECKING:\n    from .a import f",
        "from .c import g",
        "from fakequant import ir",
    ],
)
def test_the_circle_checker_can_fail(back):
    modules = {"ir/__init__.py": "from .a import f", "ir/a.py": "from .b import g", "ir/b.py": back}
    modules["ir/c.py"] = "from . import a"
    found = circles(imports_inside({Path(path): source for path, source in modules.items()}))
    assert {"fakequant.ir.a", "fakequant.ir.b"} <= {line.split(":")[0] for line in found}


def test_the_circle_checker_can_pass():
    modules = {
        "ir/__init__.py": "from .a import f",
        "ir/a.py": "from .b import g\nfrom ..ops import layout",
        "ir/b.py": "from fakequant.ir import c",
        "ir/c.py": "import fakequant.ops.layout",
        "ops/__init__.py": "",
        "ops/layout.py": "",
    }
    assert circles(imports_inside({Path(path): source for path, source in modules.items()})) == []


@pytest.mark.parametrize(
    "source",
    [
        "if fmt.name == 'int8': pass",
        "if str(fmt) in ('uint4', 'x'): pass",
        "match name:\n    case 'float8_e5m2': pass",
    ],
)
def test_the_branch_checker_can_fail(source):
    assert len(format_name_branches(source, Path("x.py"))) == 1
    assert not format_name_branches("spec = QuantSpec('int8')", Path("x.py"))


TESTS = Path(__file__).parent


def imported_test_modules(source, path):
    """What a module imports from a test module, whose helpers belong in tests/support: 'file:line: imports name'."""
    found = imported_modules(ast.walk(ast.parse(source)), ("tests", *path.with_suffix("").parts))
    return [f"{path}:{line}: imports {name}" for line, name in found if re.search(r"(^|\.)test_\w+", name)]


def test_no_test_module_is_imported():
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 100
    wrong = [found for path in files for found in imported_test_modules(path.read_text(), path.relative_to(TESTS))]
    assert not wrong, "move what they share into tests/support"


@pytest.mark.parametrize(
    "source",
    ["from tests.nn.test_layers import CASES", "import tests.nn.test_layers", "from .test_layers import CASES"],
)
def test_the_checker_of_test_modules_can_fail(source):
    assert len(imported_test_modules(source, Path("test_x.py"))) == 1
    assert not imported_test_modules("from tests.support.cases import FORMATS", Path("test_x.py"))


def loaded_after(code):
    """The modules that a fresh interpreter has loaded after some code."""
    report = f"{code}\nimport sys\nprint(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", report], check=True, capture_output=True, text=True)
    return set(output.stdout.split())


def modules_after(code):
    """Their top-level names alone."""
    return {name.split(".")[0] for name in loaded_after(code)}


def test_importing_the_package_imports_nothing_optional():
    loaded = modules_after("import fakequant")
    assert {"fakequant", "torch", "numpy"} <= loaded
    assert loaded & OPTIONAL <= {"tqdm"}  # of torch
    assert loaded & OPTIONAL == modules_after("import torch") & OPTIONAL


def rooms_after(code):
    return {name.split(".")[1] for name in loaded_after(code) if name.startswith("fakequant.")}


def test_importing_the_package_imports_no_room_for_models():
    """Their classes would double its time, and make a collection of all of torch's objects due, of 0.09 s."""
    work = "import fakequant as fq, torch; fq.fake_quantize(torch.ones(3), 'int8', scale=0.1)"
    assert rooms_after(work) == {
        "distributed",
        "errors",
        "functional",
        "memory",
        "numerics",
        "ops",
        "registry",
        "text",
        "version",
    }
    assert "model" in rooms_after("from fakequant import prepare")


@pytest.mark.exhaustive
def test_every_public_name_is_found_when_it_is_asked_for():
    ask = "import fakequant as fq; assert set(fq.__all__) <= set(dir(fq)); [getattr(fq, name) for name in fq.__all__]"
    assert {"calibration", "export", "model", "nn"} <= rooms_after(ask)
    with pytest.raises(AttributeError, match="module 'fakequant' has no attribute 'quantise'"):
        fq.quantise  # noqa: B018


def test_names_of_modules_can_be_imported_from():
    """Each is one module under two names, with one state."""
    code = "from fakequant.qat import finetune; from fakequant.presets import INT8; import fakequant as fq\n"
    code += "from fakequant.model.training import qat; import fakequant.model.presets as presets\n"
    assert "presets" in rooms_after(code + "assert fq.qat is qat and fq.presets is presets")


@pytest.mark.exhaustive
def test_triton_is_imported_by_its_kernels_alone():
    """Asking the backends, and printing what they say, imports no triton."""
    asked = "from fakequant.ops.dispatch import backends, choose\nimport fakequant as fq, torch\n"
    asked += "print(*[b.unavailable() for b in backends()], file=__import__('sys').stderr)\n"
    asked += (
        "fq.fake_quantize(torch.ones(3), 'int8', scale=0.1); choose(torch.ones(3, device='meta'), fq.QuantSpec('int8'))"
    )
    assert "triton" not in modules_after(asked)
    kernels = PACKAGE / "ops" / "triton"
    allowed = {kernels / "launch.py", *(kernels / "kernels").glob("*.py")}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ("fakequant", *path.relative_to(PACKAGE).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        at_start = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [name for _, name in imported_modules(at_start, module)]
        launched = [name for name in names if name.startswith(("triton", "fakequant.ops.triton.kernels"))]
        assert not launched or path in allowed, f"{path} imports {launched} when it is imported"


def test_the_optional_package_check_can_fail():
    assert modules_after("import safetensors") & OPTIONAL == {"safetensors"}
