"""What users do with a model, on a device and on the CPU: every public function that takes one.

A story takes a kind of model, gives results, and runs on any device. Its docstring has the functions that it calls.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import fakequant as fq
from tests.support import device as made_up
from tests.support.vision import import_torchvision

import_torchvision()  # transformers imports it

Batches = list[Any]


class Block(nn.Module):
    """Attention by a function of torch, and residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Recurrent(nn.Module):
    """An LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


class Attention(nn.Module):
    """torch's module of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0])


def _cnn() -> nn.Module:
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)),
    )
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.get_buffer("running_mean"))
            nn.init.uniform_(norm.get_buffer("running_var"), 0.5, 2)
    return net


def _transformer(name: str, **more: Any) -> nn.Module:
    import transformers

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, **more}
    config = getattr(transformers, f"{name.removesuffix('ForCausalLM').removesuffix('Model')}Config")
    return getattr(transformers, name)(config(attn_implementation="eager", **shape))


_LLAMA = {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)),
        lambda: torch.randn(32, 32),
    ),
    "convolutions": (_cnn, lambda: torch.randn(4, 3, 12, 12)),
    "block": (Block, lambda: torch.randn(2, 8, 32)),
    "recurrent": (Recurrent, lambda: torch.randn(2, 6, 8)),
    "attention": (Attention, lambda: torch.randn(2, 6, 16)),
    "llama": (lambda: _transformer("LlamaForCausalLM", **_LLAMA), lambda: _tokens(12)),
    "bert": (lambda: _transformer("BertModel", num_hidden_layers=2), lambda: _tokens(12)),
    "experts": (
        lambda: _transformer("MixtralForCausalLM", **_LLAMA | {"num_hidden_layers": 1}, num_local_experts=4),
        lambda: _tokens(16),
    ),
}
WITHOUT_SERVER = "convolutions", "recurrent", "attention"
"""Kinds of models whose layers no server for language models has."""


def _tokens(length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 64, (2, length)), "attention_mask": torch.ones(2, length, dtype=torch.long)}


def made(kind: str, device: str, count: int = 4) -> tuple[nn.Module, Batches]:
    """A model and batches, with the same numbers on all devices."""
    model, batch = MODELS[kind]
    torch.manual_seed(0)
    net = model().eval()
    torch.manual_seed(1)
    return net.to(device), tree_map_only(Tensor, lambda x: x.to(device), [batch() for _ in range(count)])


def outputs(net: nn.Module, batch: Any) -> Tensor:
    """The result of a model as a tensor."""
    return _first(net(**batch) if isinstance(batch, dict) else net(batch))


def _first(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def evaluated(net: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return outputs(net, batch)


def prepared(kind: str, device: str, preset: Any = "int8") -> tuple[nn.Module, Batches]:
    net, batches = made(kind, device)
    fq.prepare(net, preset, batches[0])
    fq.calibrate(net, batches, progress=False)
    return net, batches


def trained(net: nn.Module, batches: Batches, steps: int = 2, *, waits: int = 0, **autocast: Any) -> nn.Module:
    """Some steps of SGD, of which those after the first may wait a number of times for the made-up device."""
    optimizer = torch.optim.SGD(net.train().parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(next(net.parameters()).device.type, torch.bfloat16, **{"enabled": False} | autocast):
            loss = outputs(net, batches[0]).float().square().mean()
        loss.backward()
        optimizer.step()

    step()
    for _ in range(steps - 1):
        without_waits(net, step, but=waits)
    return net.eval()


def without_waits(net: nn.Module, run: Callable[[], object], *, but: int = 0) -> None:
    """Run something that may not wait for the made-up device, but a number of times."""
    if next(net.parameters()).device.type != made_up.NAME:
        run()
        return
    waits = {place: n for place, n in made_up.watch(run).waits.items() if place[1] != "outside"}
    if sum(waits.values()) > but:
        raise AssertionError(f"waits for the device: {waits}")


# Stories ------------------------------------------------------------------------------------------------------------


def calibrated(kind: str, device: str) -> Any:
    """prepare calibrate recalibrate summary unquantized site_plan disabled"""
    net, batches = prepared(kind, device)
    with fq.disabled(net):
        plain = evaluated(net, batches[0])
    found = evaluated(net, batches[0])
    without_waits(net, lambda: evaluated(net, batches[0]))
    texts = [str(fq.summary(net, batches[0])), str(fq.unquantized(net, batches[0])), str(fq.site_plan(net))]
    if kind == "experts":
        texts.clear()  # transformers counts tokens by functions that depend on the device
    fq.recalibrate(net, method="max")
    return plain, found, texts, net


def formats(kind: str, device: str) -> Any:
    """prepare calibrate"""
    found = []
    for preset in ("nvfp4", "mxfp8", "fp8", "int4_group32"):
        net, batches = prepared(kind, device, preset)
        found.append(evaluated(net, batches[0]))
    return found


def improved_fast(kind: str, device: str) -> Any:
    """ptq.improve"""
    net, batches = prepared(kind, device, "int4_group32")
    improvement = fq.ptq.improve(net, batches, "fast", progress=False)
    return improvement.remaining_error, net


def improved_best(kind: str, device: str) -> Any:
    """ptq.improve"""
    net, batches = prepared(kind, device)
    improvement = fq.ptq.improve(net, batches, "best", progress=False)
    return improvement.remaining_error, net


def measured(kind: str, device: str) -> Any:
    """sensitivity layer_sqnr"""
    net, batches = prepared(kind, device)
    ranked, ratios = fq.sensitivity(net, batches), fq.layer_sqnr(net, batches)
    return [str(row) for row in ranked], str(ratios)


def chosen(kind: str, device: str) -> Any:
    """compare search advise ptq.compare ptq.search ptq.advise ptq.scores ptq.verify"""
    net, batches = made(kind, device)
    presets = "int8_weight_only", "int4_group32"
    scores = fq.ptq.scores(net, batches, presets)
    search = fq.search(net, batches, bits=6.5)
    compared = [(row.preset, row.steps, row.error) for row in fq.compare(net, batches, presets).rows]
    return str(scores), str(search.config()), compared, fq.advise(net, batches, floor=15).call


def reported(kind: str, device: str) -> Any:
    """report"""
    net, batches = prepared(kind, device)
    with tempfile.TemporaryDirectory() as folder:
        return fq.report(net, batches, f"{folder}/report.html").exists()


def stored(kind: str, device: str) -> Any:
    """save load snapshot apply float_state_dict bake_weights store_codes store_floats fold"""
    net, batches = prepared(kind, device)
    y = evaluated(net, batches[0])
    with tempfile.TemporaryDirectory() as folder:
        fq.save(net, f"{folder}/model")
        for where in (device, "cpu"):
            again, same = made(kind, where)
            fq.load(again, f"{folder}/model")
            assert {tensor.device.type for tensor in again.state_dict().values()} == {where}
            assert where != device or torch.equal(evaluated(again, same[0]), y)
    applied = fq.apply(made(kind, device)[0], fq.snapshot(net))
    assert torch.equal(evaluated(applied, batches[0]), y)
    assert torch.equal(evaluated(copy.deepcopy(net), batches[0]), y)
    floats = fq.float_state_dict(net)
    baked = evaluated(fq.bake_weights(copy.deepcopy(net)), batches[0])
    fq.store_codes(net)
    without_waits(net, lambda: evaluated(net, batches[0]))
    codes = evaluated(net, batches[0])
    fq.store_floats(net)
    return y, floats, baked, codes, evaluated(net, batches[0])


def delivered(kind: str, device: str) -> Any:
    """deliver read verify_delivery encode"""
    if kind in WITHOUT_SERVER:
        return None
    found = []
    layouts = {"int4_group32": "compressed-tensors", "int8": "compressed-tensors", "int8_weight_only": "torchao"}
    for preset, layout in layouts.items():
        if (kind, layout) == ("experts", "torchao"):
            continue  # it has no experts
        net, batches = prepared(kind, device, preset)
        with tempfile.TemporaryDirectory() as folder:
            path = fq.deliver(net, f"{folder}/files", layout)
            verdict = fq.verify_delivery(path, net)
            again = fq.read(path, made(kind, device)[0])
            found.append((verdict.passed, verdict.differing, evaluated(again, batches[0])))
    net, _ = prepared(kind, device, "int4_group32")
    return found, dict(fq.encode(net, "compressed-tensors"))


def exported(kind: str, device: str) -> Any:
    """export_onnx verify_onnx export_encodings read_encodings export_pt2e"""
    if kind == "experts":
        return None  # torch exports no experts of transformers to ONNX, in float neither
    net, batches = prepared(kind, device)
    with tempfile.TemporaryDirectory() as folder:
        file = fq.export_onnx(net, batches[0], f"{folder}/model.onnx").path
        exact = fq.verify_onnx(file, net).exact
        if kind == "linear":
            encodings = fq.export_encodings(net, batches[0], f"{folder}/encodings.onnx")
            fq.read_encodings(net, batches[0], encodings.path)
            program = fq.export_pt2e(net, batches[0])
            return exact, evaluated(program.module(), batches[0])
    return exact


def trained_plain(kind: str, device: str) -> Any:
    """prepare calibrate"""
    return trained(*prepared(kind, device))


def trained_in_half(kind: str, device: str) -> Any:
    """prepare calibrate"""
    return trained(*prepared(kind, device), enabled=True)


def trained_ranges(kind: str, device: str) -> Any:
    """qat.set_scales"""
    found = []
    for method in ("lsq", "lsq_plus", "pact", "tqt"):
        net, batches = prepared(kind, device, "int8_affine" if method == "lsq_plus" else "int8")
        fq.qat.set_scales(net, fq.qat.Scales.LEARNED, method)
        found.append(trained(net, batches))
    return found


def trained_gradients(kind: str, device: str) -> Any:
    """prepare"""
    found = []
    for preset in ("fp8_training", "mxfp8_training", "nvfp4_training"):
        net, batches = made(kind, device)
        fq.prepare(net, preset)
        torch.manual_seed(5)
        found.append(trained(net, batches, waits=kind == "experts"))  # the experts' numbers of tokens
    return found


def finetuned(kind: str, device: str) -> Any:
    """qat.finetune qat.Training"""
    net, batches = prepared(kind, device)
    targets = [evaluated(net, batch) for batch in batches]
    data = [
        {**batch, "labels": target} if isinstance(batch, dict) else (batch, target)
        for batch, target in zip(batches, targets, strict=True)
    ]
    fq.qat.finetune(net, data, lambda y, target: F.mse_loss(_first(y), target), fq.qat.Schedule(0.1, 2))
    other, _ = made(kind, device)
    training = fq.qat.Training("int8", batches, scales=fq.qat.Scales.LEARNED)
    model = training.prepare(other)
    training.at(0.5)
    outputs(model, batches[0]).float().square().mean().backward()
    training.end()
    return net, model


def folded(kind: str, device: str) -> Any:
    """qat.fold_batch_norm qat.merge_batch_norm qat.freeze_batch_norm fuse_batch_norm ptq.reestimate_batch_norm"""
    if kind != "convolutions":
        return None  # the others have no batch normalisation
    net, batches = made(kind, device)
    fq.prepare(net.train(), "int8")
    fq.qat.fold_batch_norm(net, batches[0])
    fq.calibrate(net, batches, progress=False)
    trained(net, batches)
    fq.qat.freeze_batch_norm(net)
    y = evaluated(net.eval(), batches[0])
    fq.qat.merge_batch_norm(net)
    fused = fq.fuse_batch_norm(made(kind, device)[0], batches[0])
    other, _ = prepared(kind, device)
    fq.ptq.reestimate_batch_norm(other, batches)
    return y, evaluated(net, batches[0]), evaluated(fused, batches[0]), other


def transformed(kind: str, device: str) -> Any:
    """ptq.equalize ptq.rotate ptq.fold_scales"""
    found = []
    for change in (
        lambda net, batch: fq.ptq.equalize(net, batch, "int8"),
        fq.ptq.rotate,
        fq.ptq.fold_scales,
    ):
        net, batches = made(kind, device)
        try:
            found.append(str(change(net, batches[0])))
        except fq.FakeQuantError as error:  # not every model has pairs of layers, or blocks
            found.append(str(error))
        found.append(evaluated(net, batches[0]))
    return found


def solved(kind: str, device: str) -> Any:
    """ptq.gptq ptq.descend ptq.adaround ptq.reconstruct ptq.reconstruct_block ptq.find_blocks"""
    net, batches = prepared(kind, device, "int4_group32")
    fq.ptq.reconstruct(net, batches, progress=False)
    return net


def targeted(kind: str, device: str) -> Any:
    """prepare set_execution"""
    found = []
    servers = () if kind in WITHOUT_SERVER else ("vllm",)
    of_graphs = () if kind == "experts" else ("onnxruntime", "tensorrt", "openvino", "qnn")
    for target in (*of_graphs, *servers):
        net, batches = made(kind, device)
        fq.prepare(net, "int8", batches[0], target=target)
        fq.calibrate(net, batches, progress=False)
        found.append(evaluated(net, batches[0]))
        if target == "qnn" and kind in ("linear", "convolutions"):
            fq.set_execution(net, "qnn")
            found.append(evaluated(net, batches[0]))
    return found


def captured(kind: str, device: str) -> Any:
    """ir.capture"""
    if kind == "experts":
        return None  # a graph has no sizes that depend on values
    net, batches = prepared(kind, device)
    graph = fq.ir.capture(net, batches[0])
    return str(graph), graph.run(*tree_leaves(batches[0]))


STORIES: dict[str, Callable[[str, str], Any]] = {
    story.__name__: story
    for story in (
        *(calibrated, formats, improved_fast, improved_best, measured, chosen, reported, stored, delivered, exported),
        *(trained_plain, trained_in_half, trained_ranges, trained_gradients, finetuned, folded, transformed, solved),
        *(targeted, captured),
    )
}
FUNCTIONS = {name for story in STORIES.values() for name in (story.__doc__ or "").split()}


def told(story: str, kind: str, device: str) -> list[Any]:
    """The results of a story: tensors on the CPU, numbers and texts."""
    torch.manual_seed(7)
    return [_plain(leaf) for leaf in _leaves(STORIES[story](kind, device))]


def _leaves(found: Any) -> Iterable[Any]:
    for leaf in tree_leaves(found):
        yield from tree_leaves(dict(leaf.state_dict())) if isinstance(leaf, nn.Module) else (leaf,)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu()
    return leaf.replace(f"{made_up.NAME}:0", "cpu") if isinstance(leaf, str) else leaf


def with_ieee_products() -> None:
    """Forbid TF32 in convolutions, where torch allows it by default: a CPU has none."""
    torch.backends.cudnn.allow_tf32 = False  # with the newer switches torch.export fails


def differ_in_float(story: str, kind: str) -> bool:
    """Whether the model of a story has other bits on the device without quantization: torch adds in another order."""

    def run(device: str) -> list[Tensor]:
        net, batches = made(kind, device)
        if story.startswith(("trained", "finetuned")):
            for steps, autocast in ((2, {"enabled": story == "trained_in_half"}), (2, {})):
                trained(net, batches, steps, **autocast)
        return [*map(_plain, net.state_dict().values()), *(evaluated(net, batch).cpu() for batch in batches)]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return not all(map(_same, run("cpu"), run(made_up.NAME)))


def differences(story: str, kind: str) -> list[str]:
    """Where the made-up device and the CPU differ in a story."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        here, there = told(story, kind, "cpu"), told(story, kind, made_up.NAME)
    if len(here) != len(there):
        return [f"{len(here)} results on the CPU, {len(there)} on the device"]
    pairs = enumerate(zip(here, there, strict=True))
    return [f"{place}: {_shown(a)} and {_shown(b)}" for place, (a, b) in pairs if not _same(a, b)]


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    bits = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def _shown(value: Any) -> str:
    return (
        f"{value.dtype} {tuple(value.shape)} {value.flatten()[:3].tolist()}"
        if isinstance(value, Tensor)
        else repr(value)
    )


# What a device can do wrong ------------------------------------------------------------------------------------------

ON_THE_CPU: dict[str, Callable[[nn.Module, Any], object]] = {
    "prepare": lambda net, x: fq.prepare(net, "int8", x),
    "calibrate": lambda net, x: fq.calibrate(_ready(net, x), [x], progress=False),
    "improve": lambda net, x: fq.ptq.improve(_ready(net, x), [x] * 3, "fast", progress=False),
    "reconstruct": lambda net, x: fq.ptq.reconstruct(_ready(net, x), [x], progress=False),
    "sensitivity": lambda net, x: fq.sensitivity(_ready(net, x), [x]),
    "layer_sqnr": lambda net, x: fq.layer_sqnr(_ready(net, x), [x]),
    "report": lambda net, x: fq.report(_ready(net, x), [x], "report.html"),
    "summary": lambda net, x: fq.summary(_ready(net, x), x),
    "unquantized": lambda net, x: fq.unquantized(_ready(net, x), x),
    "search": lambda net, x: fq.search(net, [x] * 2, bits=6.5),
    "compare": lambda net, x: fq.compare(net, [x] * 2, ("int8",)),
    "advise": lambda net, x: fq.advise(net, [x] * 2, floor=15),
    "finetune": lambda net, x: fq.qat.finetune(_ready(net, x), [(x, x[:, :8])], F.mse_loss, fq.qat.Schedule(0.1, 1)),
    "export_onnx": lambda net, x: fq.export_onnx(_ready(net, x), x, "model.onnx"),
    "export_pt2e": lambda net, x: fq.export_pt2e(_ready(net, x), x),
    "capture": lambda net, x: fq.ir.capture(_ready(net, x), x),
    "equalize": lambda net, x: fq.ptq.equalize(net, x, "int8"),
    "rotate": lambda net, x: fq.ptq.rotate(net, x),
    "fuse_batch_norm": lambda net, x: fq.fuse_batch_norm(net, x),
}
"""Calls of functions with a model, and a batch on another device."""


def _ready(net: nn.Module, x: Tensor) -> nn.Module:
    fq.prepare(net, "int8")
    fq.calibrate(net, [x.to(made_up.NAME)], progress=False)
    return net


def refusal(function: str) -> str:
    """How a function refuses a batch on the CPU for a model on the device."""
    net, batches = made("linear", made_up.NAME)
    try:
        ON_THE_CPU[function](net, batches[0].cpu())
    except (fq.FakeQuantError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "works"


def by_default() -> list[bool]:
    """Whether a model that makes tensors without a device works where the device is torch's default."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x)) + torch.arange(64).float() / 64)

    torch.set_default_device(made_up.NAME)
    try:
        net, batches = Positions(), [torch.randn(64, 64) for _ in range(4)]
        fq.prepare(net, "int4_group32", batches[0])
        fq.calibrate(net, batches, progress=False)
        fq.ptq.improve(net, batches, "fast", progress=False)
        fq.sensitivity(net, batches)
        with tempfile.TemporaryDirectory() as folder:
            fq.save(net, f"{folder}/model")
            again = fq.load(Positions(), f"{folder}/model")
        y, same = evaluated(net, batches[0]), evaluated(again, batches[0])
    finally:
        torch.set_default_device(None)
    return [y.device.type == made_up.NAME, torch.equal(y, same)]


def launched_by_default() -> int:
    """How many operators of `improve` run on the default stream while the caller's present stream is another one."""
    net, batches = prepared("linear", made_up.NAME)
    with torch.Stream(made_up.NAME):
        return made_up.watch(partial(fq.ptq.improve, net, batches, "best", progress=False)).counts["by_default"]


def drawn(device: str) -> list[Tensor]:
    """Random numbers from one state, without and after `prepare` and `calibrate` of a model that draws some."""

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + torch.rand_like(x))

    net, batches = Noise().to(device), [torch.ones(4, 8, device=device)] * 4
    torch.manual_seed(3)
    fq.prepare(net, "int8", batches[0])
    fq.calibrate(net, batches, progress=False)
    after = torch.rand(4, device=device).cpu()
    torch.manual_seed(3)
    return [torch.rand(4, device=device).cpu(), after]


def on_the_second(kind: str) -> list[Any]:
    """The results of a model on the second device, while the first one is torch's present device."""
    net, batches = prepared(kind, f"{made_up.NAME}:1")
    fq.ptq.improve(net, batches, "best", progress=False)
    fq.sensitivity(net, batches)
    return [evaluated(net, batches[0]).cpu(), {str(x.device) for x in net.state_dict().values()}]


def with_tf32(kind: str) -> list[str]:
    """Where transforms differ from those of the CPU with TF32 in all products of the device."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    try:
        there = told("transformed", kind, made_up.NAME)[::2]
    finally:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    here = told("transformed", kind, "cpu")[::2]
    # The last line is the error of the model, which the user lets run in TF32.
    pairs = zip(*([text.partition("\nerror of")[0] for text in texts] for texts in (here, there)), strict=True)
    return [f"{a} and {b}" for a, b in pairs if a != b]


def waits_by_batch(kind: str, method: str) -> float:
    """How often `calibrate` waits for the device for each batch."""
    waits = []
    for count in (4, 8):
        net, batches = made(kind, made_up.NAME, count)
        fq.prepare(net, "int8", batches[0])
        seen = made_up.watch(partial(fq.calibrate, net, batches, method, progress=False))
        waits.append(sum(n for (_, place), n in seen.waits.items() if place != "outside"))
    return (waits[1] - waits[0]) / 4


def refused_values(kind: str, device: str) -> str:
    """How `calibrate` refuses a batch with NaN, and that the model is as before."""
    net, batches = made(kind, device)
    fq.prepare(net, "int8", batches[0])
    before = str(fq.summary(net))
    batches[2][1] = float("nan")
    try:
        fq.calibrate(net, batches, progress=False)
    except fq.FakeQuantError as error:
        return f"{error} {str(fq.summary(net)) == before}"
    return "nothing"


def launches_by_column() -> float:
    """The launches of "fast" for each column that a matrix has more, with rows enough that no halves of them judge."""
    launches = []
    for columns in (128, 384):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, 8)).to(made_up.NAME)
        batches = [torch.randn(2304, columns).to(made_up.NAME) for _ in range(4)]
        fq.calibrate(fq.prepare(net, "int4_group32"), batches, progress=False)
        seen = made_up.watch(lambda net=net, batches=batches: fq.ptq.improve(net, batches, "fast", progress=False))
        launches.append(seen.counts["launches"])
    return (launches[1] - launches[0]) / 256


def peak_of_a_head() -> float:
    """The bytes that "fast" holds at most beyond the model and its batches, as a multiple of those of a wide head."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 20_000)).to(made_up.NAME)
    batches = [torch.randn(32, 128).to(made_up.NAME) for _ in range(4)]
    fq.calibrate(fq.prepare(net, "int4_group32"), batches, progress=False)
    seen = made_up.watch(lambda: fq.ptq.improve(net, batches, "fast", progress=False))
    return seen.counts["peak"] / (4 * 128 * 20_000)


if __name__ == "__main__":  # python -m tests.support.device.stories linear.calibrated
    import sys
    import time
    import traceback
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made_up.start()
    with_ieee_products()
    for kind in MODELS:
        for story in STORIES:
            if not any(word in f"{kind}.{story}" for word in sys.argv[1:] or [""]):
                continue
            start = time.time()
            try:
                line = str(differences(story, kind)[:2]) or "same"
            except Exception as error:
                places = [
                    f"{x.filename.rpartition('/src/')[2]}:{x.lineno}" for x in traceback.extract_tb(error.__traceback__)
                ]
                line = f"FAIL {type(error).__name__}: {str(error)[:500]} at {places[-6:]}"
            print(f"{kind}.{story} {time.time() - start:.1f} s {line[:900]}", flush=True)
