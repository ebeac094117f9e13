"""Texts of graphs that were changed at random, as a careless or hostile tool would, and what reads and runs them."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Constant, Graph, IRType, TensorType
from fakequant.ir.table import ROWS
from tests.support.networks import quantized

LIMIT = 2**24
"""Bytes that one result of a run may have."""

_INTEGERS = (0, 1, -1, 2, 3, 7, 8, 255, 2**15, 2**31 - 1, -(2**31), 2**31, 2**40, 2**59, 2**62, 2**63 - 1, 10**30)
_VALUES = (
    *("0", "1", "-1", "2.5", "-0.0", "1e300", "inf", "-inf", "nan", "true", "false", "none", "[]", "[[1], [2]]", '""'),
    *("Float32", "Int64", "Boolean", "%0", "%1", "%9", "[-1]", "[%0, %0]", "device(meta)", "device(cuda:0)"),
    *("layout(sparse_coo)", "memory_format(channels_last)", '"int8"', '"int4 per_channel(0)"', '"nf4 per_token"'),
    *('"float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn"', '"int8 per_tensor stochastic"', '"reflect"', '"none"'),
)
_OPERATORS = (
    *("aten.index.Tensor", "aten.gather.default", "aten.scatter.src", "aten.index_put.default", "aten.take.default"),
    *("aten.scatter_add.default", "aten.embedding.default", "aten.nll_loss.default", "aten.one_hot.default"),
    *("aten.max_unpool2d.default", "aten.grid_sampler_2d.default", "aten.col2im.default", "aten.searchsorted.Tensor"),
    *("aten.embedding_bag.default", "aten.cumsum.default", "aten.sort.default", "aten.topk.default"),
    *("aten.repeat.default", "aten.roll.default", "aten.unfold.default", "aten.ones.default", "aten.nonzero.default"),
    *("aten.select_scatter.default", "aten.slice_scatter.default", "aten.reflection_pad2d.default"),
    *("aten.as_strided.default", "aten.empty.memory_format", "aten.from_file.default", "aten.resize.default"),
    *("aten.embedding_dense_backward.default", "aten._foreach_add.List", "aten.relu_.default"),
    *("fakequant_cpu.mask_gradient.default", "fakequant_cpu.checked.default", "fakequant.grad_input.default"),
    *("prims.as_strided.default", "torchvision.nms.default", "quantized.linear.default", "nowhere.none.default"),
)
_LINES = (
    '    t9001 = aten.from_file.default() {filename="graph-mutation-victim", shared=true, size=64} : Float32 [64]',
    "    t9001 = aten.ones.default() {size=[600000000]} : Float32 [600000000]",
    "    t9001 = aten.arange.default() {end=100000000000} : Int64 [100000000000]",
    "    t9001 = ReLU(t0) {a=" + "[" * 5000 + "]" * 5000 + "} : Float32 [4]",
    '    t9001 = Fused(t0) {body=["t1 = aten.from_file.default() {size=1} : Float32 [1]"], name="a"} : Half [1]',
    "    t9001 = " + "t0, " * 2000 + "t0 = Unbind(t0) : Float32 [4]",
)


def graph_mutations(seed: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Texts without end, each with the tensors that it names, with one to four changes; the same for the same seed.

    The digests in the text are those of the tensors, so that changed tensors are read too.
    """
    draw = random.Random(seed)
    while True:
        graph = _bases()[draw.randrange(len(_bases()))].copy()
        if draw.random() < 0.4:
            _change_constants(graph, draw)
        lines = ir.to_text(graph).split("\n")
        for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
            draw.choice(_CHANGES)(lines, draw)
        yield "\n".join(lines), {constant.name: constant.tensor for constant in graph.constants.values()}


def read_and_run(text: str, tensors: dict[str, Tensor], seed: int = 0) -> bool:
    """Read a text, and run it on random inputs; whether it was valid and ran.

    Raises:
        GraphError: it could not be read, is not valid, or an operation failed: what a changed text should give.
    """
    draw = random.Random(seed)
    graph = ir.parse(text, tensors).check()
    types = [value.type for value in graph.inputs.values()]
    if any(type.shape.element_count > 10**6 for type in types):
        return False
    with torch.no_grad():
        graph.run(*(_input(type, draw) for type in types), limit=LIMIT)
    return True


@cache
def _bases() -> tuple[Graph, ...]:
    found = []
    for network, preset in (("CNN", "INT8"), ("transformer", "NVFP4"), ("LSTM", "INT8")):
        model, x = quantized(network, preset)
        graph = ir.capture(model, x)
        found += [graph, ir.optimize(graph, ir.ALL).graph]
    return (*found, _of_indices(), _of_sizes())


def _of_indices() -> Graph:
    """A graph of operations that read what integers say."""
    graph = Graph("indices")
    x = graph.add_input("x", IRType.Float32, (4, 8))
    rows = graph.add_constant("rows", torch.tensor([0, 3, 1, 1, 2]))
    places = graph.add_constant("places", torch.arange(32).reshape(4, 8) % 4)
    table = graph.add_constant("table", torch.randn(9, 5))
    a = graph.add("Gather", x, rows, dim=0)
    b = graph.add("aten.gather.default", x, places, dim=0)
    c = graph.add("Embedding", table, places)
    d = graph.add("aten.scatter_add.default", x, places, b, dim=0)
    e = graph.add("aten.take.default", x, places)
    f = graph.add("Slice", d, dim=1, start=1, end=7, step=2)
    graph.outputs = [a, c, e, f, graph.add("aten.index.Tensor", x, rows, indices=[ir.Ref(1)])]
    return graph


class _Sizes(nn.Module):
    """Computes with the size of a dimension that only a run tells."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(x.shape[0] * 2, -1).unsqueeze(0).expand(x.shape[0] + 1, -1, -1)
        return fq.fake_quantize(y * x.shape[0], "int8 per_token")


def _of_sizes() -> Graph:
    return ir.capture(_Sizes(), torch.randn(3, 8), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


def _input(type: TensorType, draw: random.Random) -> Tensor:
    shape = [3 if n == -1 else n for n in type.shape]
    dtype = type.type.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else draw.choice((2, 8, 100)), shape).to(dtype)


def _change_constants(graph: Graph, draw: random.Random) -> None:
    """Give one constant other numbers, another type or another shape."""
    if not graph.constants:
        return
    id, constant = draw.choice(list(graph.constants.items()))
    tensor, kind = constant.tensor.detach().clone(), draw.randrange(4)
    if kind == 0 and not tensor.is_floating_point() and not tensor.is_complex():
        tensor.view(-1)[draw.randrange(tensor.numel())] = draw.choice((-1, 9, 100, -(2**31), 2**31 - 1))
    elif kind == 0:
        tensor.view(-1)[draw.randrange(tensor.numel())] = draw.choice((float("nan"), float("inf"), -1.0, 0.0, 1e38))
    elif kind == 1:
        tensor = tensor.to(draw.choice((torch.float64, torch.float16, torch.int64, torch.int8, torch.bool)))
    elif kind == 2:
        tensor = tensor.reshape(-1)[: draw.choice((1, 2, tensor.numel()))].clone()
    else:
        tensor = tensor.unsqueeze(0)
    graph.constants[id] = Constant(constant.name, tensor)


def _number(lines: list[str], draw: random.Random) -> None:
    """Another number somewhere."""
    at = draw.randrange(len(lines))
    if found := list(re.finditer(r"-?\d+", lines[at])):
        place = draw.choice(found)
        lines[at] = f"{lines[at][: place.start()]}{draw.choice(_INTEGERS)}{lines[at][place.end() :]}"


def _attribute(lines: list[str], draw: random.Random) -> None:
    """Another value of an attribute."""
    at = draw.randrange(len(lines))
    if found := list(re.finditer(r"(?<==)[^,{}]+(?=[,}])", lines[at])):
        place = draw.choice(found)
        lines[at] = f"{lines[at][: place.start()]}{draw.choice(_VALUES)}{lines[at][place.end() :]}"


def _operator(lines: list[str], draw: random.Random) -> None:
    """Another operation between the same values."""
    at = draw.randrange(len(lines))
    name = draw.choice((draw.choice(sorted(ROWS)), draw.choice(_OPERATORS)))
    lines[at] = re.sub(r"= [\w.]+\(", f"= {name}(", lines[at], count=1)


def _read(lines: list[str], draw: random.Random) -> None:
    """Other values that an operation reads."""
    at = draw.randrange(len(lines))
    ids = ", ".join(f"t{draw.choice((0, 1, 2, 5, 10, 20, 9999))}" for _ in range(draw.choice((0, 1, 2, 3, 100))))
    lines[at] = re.sub(r"\((t\d+(, )?)*\)", f"({ids})", lines[at], count=1)


def _type(lines: list[str], draw: random.Random) -> None:
    """Another declared type or shape."""
    at = draw.randrange(len(lines))
    shape = draw.choice(("scalar", "[4]", "[?, 8]", "[0]", "[600000000]", "[2, 3"))
    other = f": {draw.choice(list(IRType)).value} {shape}"
    lines[at] = re.sub(r": \w+ (scalar|\[[^\]]*\])", other, lines[at], count=1)


def _line(lines: list[str], draw: random.Random) -> None:
    """A line taken away, doubled, moved or added."""
    at, kind = draw.randrange(len(lines)), draw.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[at])
    elif kind == 2:
        lines.insert(draw.randrange(len(lines)), lines.pop(at))
    else:
        places = [i for i, line in enumerate(lines) if line.startswith("  Operations")]
        lines.insert((places[0] if places else 0) + 1, draw.choice(_LINES))
        for i in places:
            lines[i] = re.sub(r"\d+", lambda found: str(int(found[0]) + 1), lines[i])
    if not lines:
        lines.append("")


def _piece(lines: list[str], draw: random.Random) -> None:
    """A line cut or with other characters."""
    at = draw.randrange(len(lines))
    place = draw.randrange(len(lines[at]) + 1)
    piece = draw.choice(("", '"', "\\", "{", "}", "#", "  # ", "\x00", "\ud800", "²", "[" * 1000, "t" * 1000))
    lines[at] = lines[at][:place] + piece + lines[at][place + draw.choice((0, 1, 5)) :]


_CHANGES: tuple[Callable[[list[str], random.Random], None], ...] = (
    *(_number, _number, _attribute, _attribute, _operator, _read, _type, _line, _piece),
)


def main(count: int, seed: int) -> None:
    """Read and run many changed texts; what is neither refused nor right ends it with a traceback."""
    ran = refused = 0
    for text, tensors in itertools.islice(graph_mutations(seed), count):
        try:
            ran += read_and_run(text, tensors)
        except GraphError:
            refused += 1
    print(f"{count} changed texts: {refused} refused, {ran} ran")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
