"""A text is read without harm: nothing runs, nothing is written, and what it may call is limited."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Graph, IRType
from fakequant.ir.permitted import check_permitted
from tests.hostile.graph_mutations import graph_mutations, read_and_run
from tests.support.bits import assert_same_bits

LINES = '    t0 = "x" : Float32 [4]\n  Constants (0):\n  Operations ({count}):\n{ops}\n  Outputs: t{out}\n'


def text_of(*ops, out=1):
    body = "\n".join(f"    {op}" for op in ops)
    return "IR Graph: g\n  Inputs:\n" + LINES.format(count=len(ops), ops=body, out=out)


def files_of(text, folder):
    """A file of a text and its constants, none."""
    graph = Graph("g")
    graph.outputs = [graph.add("ReLU", graph.add_input("x", IRType.Float32, (4,)))]
    path = ir.save(graph, folder / "graph.txt")
    path.write_text(text)
    return path


def test_loading_a_text_writes_no_file(tmp_path):
    victim, other = tmp_path / "victim.cfg", tmp_path / "other"
    victim.write_bytes(b"precious..")
    for path in (victim, other):
        line = f't1 = aten.from_file.default() {{filename="{path}", shared=true, size=64}} : Float32 [64]'
        with pytest.raises(GraphError, match=r"may not call the operator 'aten\.from_file\.default'"):
            ir.load(files_of(text_of(line, "t2 = ReLU(t0) : Float32 [4]", out=2), tmp_path))
    assert victim.read_bytes() == b"precious.."
    assert not other.exists()


@pytest.mark.parametrize(
    "line",
    [
        "t1 = aten.ones.default() {size=[281474976710656]} : Float32 [281474976710656]",
        "t1 = aten.full.default() {fill_value=1.0, size=[281474976710656]} : Float32 [281474976710656]",
        "t1 = aten.arange.default() {end=281474976710656} : Int64 [281474976710656]",
        "t1 = aten.eye.default() {n=16777216} : Float32 [16777216, 16777216]",
        "t1 = aten.zeros.default() {device=device(cpu), size=[281474976710656]} : Float32 [281474976710656]",
    ],
)
def test_loading_a_text_makes_no_memory(line, tmp_path):
    graph = ir.load(files_of(text_of(line), tmp_path))
    with pytest.raises(GraphError, match="more than the limit of 1000 bytes"):
        graph.run(torch.zeros(4), limit=1000)


def test_the_limit_holds_for_sizes_that_only_a_run_tells():
    graph = Graph("g")
    x = graph.add_input("x", IRType.Float32, (-1,))
    column = graph.add("Unsqueeze", x, dim=1)
    graph.outputs = [graph.add("Add", x, column)]
    assert graph.run(torch.ones(100), limit=40_000).shape == (100, 100)
    with pytest.raises(GraphError, match=r"would make Float32 \[100, 100\], more than the limit of 39999 bytes"):
        graph.run(torch.ones(100), limit=39_999)


def test_sizes_that_do_not_fit_are_refused_before_the_operation_runs():
    graph = Graph("g")
    x, y = (graph.add_input(name, IRType.Float32, (-1,)) for name in "xy")
    graph.outputs = [graph.add("aten.dot.default", x, y)]
    assert graph.run(torch.ones(3), torch.ones(3)) == 3
    with pytest.raises(GraphError, match=r"aten\.dot\.default.*torch refuses it"):
        graph.run(torch.ones(3), torch.ones(4))


REFUSED = [
    *("aten.from_file.default", "aten.empty.memory_format", "aten.empty_strided.default", "aten.new_empty.default"),
    *(
        "aten.as_strided.default",
        "aten.set.source_Tensor",
        "aten.resize.default",
        "aten.embedding_dense_backward.default",
    ),
    *("aten._foreach_add.Scalar", "aten._cudnn_rnn.default", "aten.to_mkldnn.default", "aten.segment_reduce.default"),
    *("aten._pad_packed_sequence.default", "aten._embedding_bag.default", "aten.fbgemm_pack_gemm_matrix_fp16.default"),
    *("aten._unsafe_index.Tensor", "aten._nested_from_padded.default", "aten.linalg_eigvals.default"),
    *("aten.sparse_coo_tensor.indices", "aten.quantize_per_tensor.default", "aten.bincount.default"),
    *("fakequant.grad_input.default", "fakequant.fake_quantize.default", "fakequant_cpu.dequantize.default"),
    *("prims.as_strided.default", "quantized.linear.default", "profiler._record_function_enter_new.default"),
    *("aten.relu_.default", "load_library.a.b"),
]


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_text_may_not_call(name):
    with pytest.raises(GraphError, match=f"may not call the operator '{name}'.*allow_operator"):
        ir.parse(text_of(f"t1 = {name}(t0) : Float32 [4]"))
    inner = f"t1 = {name}(t0) : Float32 [4]"
    with pytest.raises(GraphError, match=f"may not call the operator '{name}'"):
        ir.parse(text_of(f't1 = Fused(t0) {{body=["{inner}"], name="a"}} : Float32 [4]'))


@pytest.mark.parametrize(
    "name",
    ["ReLU", "aten.add.Tensor", "aten.__and__.Tensor", "aten.triu.default", "aten.index.Tensor", "aten.zeros.default"],
)
def test_what_a_text_may_call(name):
    check_permitted(name)


def test_kernels_of_the_package_are_in_no_graph():
    graph = Graph("g")
    x = graph.add_input("x", IRType.Float32, (4,))
    with pytest.raises(GraphError, match="a kernel that trusts its arguments"):
        graph.add("fakequant_cpu.mask_gradient.default", x, x)
    # By allowing it neither.
    with pytest.raises(GraphError, match="a kernel that trusts its arguments"):
        ir.allow_operator("fakequant_cpu.mask_gradient.default")


def test_an_operator_of_another_library_is_allowed_by_name():
    with torch.library._scoped_library("permitted_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")

        class Twice(nn.Module):
            def forward(self, x):
                return torch.ops.permitted_test.twice(x)

        graph = ir.capture(Twice(), torch.ones(4))
        assert_same_bits(graph.run(torch.ones(4)), torch.full((4,), 2.0))
        with pytest.raises(GraphError, match=r"fakequant\.ir\.allow_operator\('permitted_test\.twice\.default'\)"):
            ir.parse(str(graph))
        ir.allow_operator("permitted_test.twice.default")
        assert ir.parse(str(graph)) == graph
    with pytest.raises(GraphError, match="torch has no operator"):
        ir.allow_operator("permitted_test.thrice.default")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "aten.linalg_svdd.default",
            r"'aten\.linalg_svdd\.default'; did you mean .*aten\.linalg_svd\.default",
        ),
        ("aten.add.Tensr", r"did you mean .*aten\.add\.Tensor"),
        ("nothing like it", r"no operator 'nothing like it'; its names are such as aten\.add\.Tensor"),
    ],
)
def test_an_unknown_operator_is_not_allowed_and_the_nearest_are_named(name, message):
    with pytest.raises(GraphError, match=message):
        ir.allow_operator(name)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [("device=device(meta), size=[4]", "meta, which has no memory"), ("layout=layout(sparse_coo), size=[4]", "sparse")],
)
def test_tensors_that_graphs_do_not_hold(attributes, message):
    graph = ir.parse(text_of(f"t1 = aten.zeros.default() {{{attributes}}} : Float32 [4]"))
    with pytest.raises(GraphError, match=message):
        graph.check()


MANY = [
    "Unbind(t1) : Float32 [1]",
    "Split(t1) {split_size=1} : Float32 [1]",
    "aten.chunk.default(t1) {chunks=1000000000} : Float32 [1]",
    "aten.tensor_split.sections(t1) {sections=4611686018427387904} : Float32 [1]",
    "aten.unsafe_split.Tensor(t1) {split_size=1} : Float32 [1]",
]


@pytest.mark.parametrize("line", MANY)
def test_an_operation_makes_no_millions_of_values(line):
    ones = "t1 = aten.ones.default() {size=[1000000000]} : Float32 [1000000000]"
    with pytest.raises(GraphError, match="values; an operation makes at most 65536"):
        ir.parse(text_of(ones, f"t2 = {line}", out=2)).check()


def test_changed_texts_are_refused_or_run(tmp_path, monkeypatch):
    """Nothing is written, and nothing but a GraphError comes; `python -m hostile.graph_mutations` does more."""
    monkeypatch.chdir(tmp_path)
    ran = 0
    for text, tensors in itertools.islice(graph_mutations(0), 50):
        with contextlib.suppress(GraphError):
            ran += read_and_run(text, tensors)
    assert 5 < ran < 45
    assert not list(tmp_path.iterdir())
