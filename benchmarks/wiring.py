"""Right files of deep models and files with a fault in their wiring: `fakequant.verify_onnx` has to tell them apart.

Run `python -m benchmarks.wiring`, with a seed as an argument for other numbers. 40 models are exported and verified as
they are, and with a fault that is made in the ONNX graph. A right file has to pass. A wrong one has to be refused, and
a quantizer or an output named to which the changed node leads directly. Random weights; two minutes on one core.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.export.capability import read
from fakequant.export.inputs import names_read

Batch = tuple[Tensor, ...]


class Residual(nn.Module):
    """A block of convolutions with a sum around it."""

    def __init__(self, width: int, groups: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=groups), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Squeeze(nn.Module):
    """Channels weighted by what they hold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))


class Dense(nn.Module):
    """Layers that read all layers before them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(width * (i + 1), width, 3, padding=1) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(F.relu(layer(torch.cat(seen, 1))))
        return seen[-1]


class UNet(nn.Module):
    """Down, up, and a path across."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = Residual(2 * width)
        self.up, self.last = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.first(x))
        middle = self.middle(F.relu(self.down(first)))
        return self.last(torch.cat([first, F.relu(self.up(middle))], 1))


class Attention(nn.Module):
    """Attention of several heads, in parts or by torch's function."""

    def __init__(self, width: int, heads: int, *, in_parts: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.in_parts, self.causal = heads, in_parts, causal

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            layer(of).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, of in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        if self.in_parts:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, *, before: bool = True, **options: Any) -> None:
        super().__init__()
        self.attention = Attention(width, 4, **options)
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down, self.before = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), before

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attention(self.norm(x))
            return x + self.down(F.gelu(self.up(self.other_norm(x))))
        x = self.norm(x + self.attention(x))
        return self.other_norm(x + self.down(F.gelu(self.up(x))))


class Shared(nn.Module):
    """One block, called twelve times."""

    def __init__(self, width: int, times: int = 12) -> None:
        super().__init__()
        self.table, self.block, self.times = nn.Embedding(50, width), Block(width, before=False), times
        self.head = nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(self.times):
            x = self.block(x)
        return self.head(x)


class Decoder(nn.Module):
    """Tokens with positions, causal blocks, logits."""

    def __init__(self, width: int, depth: int, *, in_parts: bool) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(50, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(*(Block(width, in_parts=in_parts, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Cross(nn.Module):
    """Attention over other tokens, several inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.cross = Attention(width, 4), Attention(width, 4)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(x)
        return self.head(self.norm(x + self.cross(x, memory)))


class Towers(nn.Module):
    """Two inputs of one shape, compared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.rest = nn.Sequential(*itertools.chain(*((nn.Linear(width, width), nn.ReLU()) for _ in range(8))))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.a(x), torch.tanh(self.b(y))
        return self.rest(a - b), (a * b).sum(-1)


class Recurrent(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, make: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = make(12, 16, batch_first=True, **options)
        self.head = nn.Linear(16 * (2 if options.get("bidirectional") else 1), 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


class Cell(nn.Module):
    """A cell with its state as inputs and outputs, for some steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            found.append(self.head(h))
        return torch.stack(found, 1), h, c


class Dilated(nn.Module):
    """Causal convolutions with growing distances, and gates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            gate, value = layer(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + torch.sigmoid(gate) * torch.tanh(value)
        return x


class Mixer(nn.Module):
    """Tokens and features mixed in turn."""

    def __init__(self, tokens: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.ModuleList(nn.Linear(tokens, tokens) for _ in range(depth))
        self.features = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for tokens, features in zip(self.tokens, self.features, strict=True):
            x = x + F.gelu(tokens(x.transpose(1, 2))).transpose(1, 2)
            x = x + F.gelu(features(x))
        return x


class Graph(nn.Module):
    """Messages along the edges of a dense graph."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges.softmax(-1)
        for layer in self.layers:
            x = x + F.relu(edges @ layer(x))
        return x


def _image(*sizes: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(2, *sizes),)


def _ids() -> Batch:
    return (torch.randint(0, 50, (2, 12)),)


def _pair() -> Batch:
    return torch.randn(4, 16), torch.randn(4, 16)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "residual": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual(16) for _ in range(6))),
        _image(3, 12, 12),
    ),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), *(nn.Sequential(Residual(16, 16), Squeeze(16)) for _ in range(3))
        ),
        _image(3, 8, 8),
    ),
    "dense": (lambda: Dense(6, 6), _image(6, 8, 8)),
    "unet": (lambda: UNet(8), _image(3, 8, 8)),
    "transformer": (lambda: nn.Sequential(*(Block(32) for _ in range(4)), nn.Linear(32, 8)), _image(10, 32)),
    "transformer_sdpa": (lambda: nn.Sequential(*(Block(32, in_parts=False) for _ in range(4))), _image(10, 32)),
    "shared": (lambda: Shared(32), _ids),
    "torch_encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3),
        _image(10, 32),
    ),
    "decoder": (lambda: Decoder(32, 3, in_parts=True), _ids),
    "decoder_sdpa": (lambda: Decoder(32, 3, in_parts=False), _ids),
    "cross": (lambda: Cross(32), lambda: (torch.randn(2, 10, 32), torch.randn(2, 10, 32))),
    "towers": (lambda: Towers(16), _pair),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), _image(20, 12)),
    "lstm_both": (lambda: Recurrent(nn.LSTM, bidirectional=True), _image(12, 12)),
    "gru": (lambda: Recurrent(nn.GRU), _image(40, 12)),
    "gru_both": (lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), _image(8, 12)),
    "cell": (lambda: Cell(16), lambda: (torch.randn(2, 10, 16), torch.randn(2, 16), torch.randn(2, 16))),
    "dilated": (lambda: Dilated(8), _image(8, 32)),
    "mixer": (lambda: Mixer(16, 16, 4), _image(16, 16)),
    "graph": (lambda: Graph(16, 5), lambda: (torch.randn(2, 8, 16), torch.randn(2, 8, 8))),
}
WAYS = (("int8", None), ("int8_affine", "onnxruntime"), ("int8", "openvino"), ("int8_affine", None))


def _replaced(nodes: Any, old: str, new: str, where: Any = None) -> list[Any]:
    """Have nodes read another tensor; those that were changed."""
    changed = []
    for node in nodes if where is None else [where]:
        if old in node.input:
            node.input[:] = [new if name == old else name for name in node.input]
            changed.append(node)
    return changed


def _swapped_inputs(model: Any) -> Iterator[Callable[[], list[str]]]:
    """Two inputs of one shape, in each other's place."""
    shapes = {value.name: str(value.type) for value in model.graph.input}
    for a, b in itertools.combinations(shapes, 2):
        if shapes[a] == shapes[b]:

            def make(a: str = a, b: str = b) -> list[str]:
                nodes = [node for node in model.graph.node if a in node.input or b in node.input]
                for node in nodes:
                    node.input[:] = [{a: b, b: a}.get(name, name) for name in node.input]
                return [name for node in nodes for name in node.output]

            yield make


def _dropped_sum(model: Any) -> Iterator[Callable[[], list[str]]]:
    """A sum of two computed tensors without one of them."""
    made = {name for node in model.graph.node for name in node.output} | {value.name for value in model.graph.input}
    for node in model.graph.node:
        if node.op_type == "Add" and all(name in made for name in node.input):

            def make(node: Any = node) -> list[str]:
                node.op_type = "Identity"
                del node.input[1]
                return [*node.output]

            yield make


def _constant_input(model: Any) -> Iterator[Callable[[], list[str]]]:
    """An input that is a constant of zeros."""
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]

        def make(value: Any = value, kind: Any = kind, shape: list[int] = shape) -> list[str]:
            zeros = torch.zeros(shape).numpy().astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
            model.graph.initializer.append(numpy_helper.from_array(zeros, "constant_input"))
            changed = _replaced(model.graph.node, value.name, "constant_input")
            return [name for node in changed for name in node.output]

        yield make


def _operands(*operators: str) -> Callable[[Any], Iterator[Callable[[], list[str]]]]:
    """Operands of a node in each other's place: of a difference, a joint, a product of square matrices."""

    def found(model: Any) -> Iterator[Callable[[], list[str]]]:
        for node in model.graph.node:
            if node.op_type in operators and len(node.input) > 1 and node.input[0] != node.input[1]:

                def make(node: Any = node) -> list[str]:
                    node.input[0], node.input[1] = node.input[1], node.input[0]
                    return [*node.output]

                yield make

    return found


def _one_for_another(model: Any) -> Iterator[Callable[[], list[str]]]:
    """A node that reads the result of another layer of the same form: q for k, a gate for another."""
    layers = [node for node in model.graph.node if node.op_type in ("Add", "Gemm", "MatMul", "Conv")]
    for first, second in itertools.pairwise(layers):
        if first.op_type == second.op_type and first.output[0] not in second.input:

            def make(first: Any = first, second: Any = second) -> list[str]:
                a, b = first.output[0], second.output[0]
                nodes = [node for node in model.graph.node if a in node.input or b in node.input]
                for node in nodes:
                    node.input[:] = [{a: b, b: a}.get(name, name) for name in node.input]
                _sort(model)
                return [name for node in nodes for name in node.output]

            yield make


def _other_function(model: Any) -> Iterator[Callable[[], list[str]]]:
    """An activation that is another one."""
    for node in model.graph.node:
        if (other := {"Relu": "Identity", "Sigmoid": "HardSigmoid", "Tanh": "Softsign"}.get(node.op_type)) is not None:

            def make(node: Any = node, other: str = other) -> list[str]:
                node.op_type = other
                return [*node.output]

            yield make


def _other_order(model: Any) -> Iterator[Callable[[], list[str]]]:
    """A transposition whose last two axes are not exchanged, where they have one length."""
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.attribute[0].ints[-1] != len(node.attribute[0].ints) - 1:

            def make(node: Any = node) -> list[str]:
                node.attribute[0].ints[:] = range(len(node.attribute[0].ints))
                return [*node.output]

            yield make


def _other_step(model: Any) -> Iterator[Callable[[], list[str]]]:
    """Gates of a recurrent loop in each other's place."""
    for node in model.graph.node:
        if node.op_type == "Scan":
            (body,) = (attribute.g for attribute in node.attribute if attribute.name == "body")
            for split in [inner for inner in body.node if inner.op_type == "Split"]:

                def make(node: Any = node, split: Any = split) -> list[str]:
                    split.output[0], split.output[1] = split.output[1], split.output[0]
                    return [*node.output]

                yield make


def _sort(model: Any) -> None:
    """Put nodes behind those that make what they read."""
    ready = {value.name for value in (*model.graph.input, *model.graph.initializer)} | {""}
    waiting, nodes = [*model.graph.node], []
    while waiting:
        now = [node for node in waiting if names_read([node]) <= ready | set(_inner(node))]
        if not now:
            raise ValueError("a circle")
        nodes += now
        ready |= {name for node in now for name in node.output}
        waiting = [node for node in waiting if node not in now]
    copies = [helper.make_node(node.op_type, node.input, node.output) for node in nodes]
    for copy, node in zip(copies, nodes, strict=True):
        copy.CopyFrom(node)
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _inner(node: Any) -> Iterator[str]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from (value.name for value in attribute.g.input)
            yield from (name for inner in attribute.g.node for name in inner.output)
            yield from (tensor.name for tensor in attribute.g.initializer)


FAULTS: dict[str, Callable[[Any], Iterator[Callable[[], list[str]]]]] = {
    "swapped inputs": _swapped_inputs,
    "constant input": _constant_input,
    "gates exchanged": _other_step,
    "dropped sum": _dropped_sum,
    "exchanged results": _one_for_another,
    "other function": _other_function,
    "exchanged operands": _operands("Sub", "Concat", "MatMul"),
    "no transposition": _other_order,
}


def sinks(model: Any, names: list[str]) -> set[str]:
    """The quantizers and outputs that tensors lead to without a quantizer between."""
    sites = [site for site in read(model).sites if not site.codes]
    ends = {site.x: site.quantizer for site in sites}
    results, found, waiting, seen = {site.y for site in sites}, set(), [*names], set(names)
    outputs = {value.name for value in model.graph.output}
    while waiting:
        name = waiting.pop()
        found |= {site.quantizer for site in sites if name in (site.x, site.y)} | ({name} & outputs)
        for node in model.graph.node if name not in results else ():
            if name in names_read([node]):
                new = [one for one in node.output if one not in seen]
                seen.update(new)
                waiting += new
    return found | {ends[name] for name in names if name in ends}


def exported(name: str, preset: str, target: str | None, seed: int) -> tuple[nn.Module, bytes, list[Batch]]:
    """A calibrated model, its file, and batches to verify it with."""
    torch.manual_seed(seed)
    make, batch = MODELS[name]
    model, example = make().eval(), batch()
    fq.prepare(model, preset, example if target else None, **({"target": target} if target else {}))
    fq.calibrate(model, [batch() for _ in range(4)])
    with tempfile.TemporaryDirectory() as folder:
        path = fq.export_onnx(model, example, f"{folder}/model.onnx").path
        return model, path.read_bytes(), [batch(), batch()]


def verified(data: bytes, model: nn.Module, batches: list[Batch]) -> fq.export.VerifyReport:
    """The report of a file."""
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(data)
        file.flush()
        return fq.verify_onnx(file.name, model, batches)


def wrong(data: bytes, fault: str, seed: int) -> tuple[bytes, set[str]] | None:
    """A file with a fault, and the places of which one has to be named; None where the graph cannot have it."""
    model = onnx.load_model_from_string(data)
    choices = [*FAULTS[fault](model)]
    for shift in range(len(choices)):
        model = onnx.load_model_from_string(data)
        choices = [*FAULTS[fault](model)]
        try:
            places = sinks(model, choices[(seed + shift) % len(choices)]())
            onnx.checker.check_model(model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError):
            continue
        return model.SerializeToString(), places
    return None


def main(first: int = 0) -> int:
    """Verify all files, made by random numbers from a seed on; the number of wrong verdicts."""
    warnings.simplefilter("ignore")
    cases = [(name, *WAYS[(i + j) % len(WAYS)]) for i, name in enumerate(MODELS) for j in (0, 1)]
    faults = itertools.cycle(FAULTS)
    bad = passed = refused = 0
    for seed, (name, preset, target) in enumerate(cases, first):
        model, data, batches = exported(name, preset, target, seed)
        right = verified(data, model, batches)
        passed += right.passed
        worst = max((span.gap / span.allowed for span in right.spans if span.gap), default=0.0)
        found = None
        while found is None:
            fault = next(faults)
            found = wrong(data, fault, seed)
        try:
            report = verified(found[0], model, batches)
            unlike = [row.quantizer for row in report.rows if not row.exact]
            named = next(iter(unlike + [span.name for span in report.spans if not span.fits]), "nothing")
            good = not report.passed and named in found[1]
        except fq.FakeQuantError as error:
            named, good = str(error)[-120:], False
        refused += good
        bad += (not right.passed) + (not good)
        print(
            f"{name:17} {preset:12} {target!s:12} {'passed' if right.passed else 'REFUSED'} ({worst:.2f})  {fault:19} "
            f"{'refused' if good else 'PASSED'}: {named}",
            flush=True,
        )
        if not right.passed:
            print("   ", "\n    ".join(right.faults or str(right).splitlines()[-6:]))
    print(
        f"right files: {passed} of {len(cases)} passed; wrong files: {refused} of {len(cases)} refused with the place"
    )
    return bad


if __name__ == "__main__":
    sys.exit(1 if main(*map(int, sys.argv[1:])) else 0)
