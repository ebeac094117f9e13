"""llm-compressor and AutoRound on the language model, which they take in the shape of a model of transformers alone.

No requirement of theirs agrees with the others' here, so that they are installed beside them, without requirements:
pip install --no-deps llmcompressor compressed-tensors auto-round loguru datasets py-cpuinfo pyarrow dill xxhash
multiprocess nvidia-ml-py pandas python-dateutil
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.peers import Run
from examples.demo.text import Transformer
from tests.support.vision import import_torchvision

_ITERATIONS = 200  # AutoRound's default


def language_runs(case: Case, model: nn.Module) -> dict[str, Run]:
    """The runs of a case, by what the table calls them; none for models of other kinds."""
    if not isinstance(model, Transformer):
        return {}
    import_torchvision()  # transformers imports it
    found: dict[str, Run] = {}
    if _is_there("llmcompressor"):
        found["llm-compressor GPTQ"] = llm_compressor(case)
    if _is_there("auto_round") and case.input is None:
        found["AutoRound"] = auto_round(case)
    return found


def _is_there(name: str) -> bool:
    if importlib.util.find_spec(name) is not None:
        return True
    print(f"{name} is not installed, and has no column: see benchmarks/accuracy/language_peers.py", flush=True)
    return False


def llm_compressor(case: Case) -> Run:
    """A case by GPTQ of llm-compressor, with its order of columns by activations."""

    def run(model: nn.Module, batches: list[Tensor]) -> nn.Module:
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationScheme,
            preset_name_to_scheme,
        )
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier

        if "FP4" in case.name:
            scheme = preset_name_to_scheme(case.name.split()[0], ["Linear"])
        else:
            weights: dict[str, Any] = {"num_bits": int(case.name[1]), "symmetric": True, "actorder": "static"}
            group = _group(case)
            weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
            inputs = QuantizationArgs(num_bits=8, symmetric=True, strategy="tensor") if case.input else None
            scheme = QuantizationScheme(
                targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs
            )
        wrapped = _wrapped(model)
        oneshot(
            model=wrapped.model,
            dataset=loader(batches),
            processor=wrapped.tokenizer,
            recipe=GPTQModifier(config_groups={"all": scheme}),
            pipeline="basic",
            num_calibration_samples=sum(map(len, batches)),
        )
        return wrapped.model.inner

    return run


def auto_round(case: Case) -> Run:
    """A case by AutoRound with its default of 200 steps for each block."""

    def run(model: nn.Module, batches: list[Tensor]) -> nn.Module:
        from auto_round import AutoRound

        wrapped = _wrapped(model)
        bits = {"bits": int(case.name[1]), "group_size": _group(case) or -1, "sym": True}
        blocks = [name for name, module in wrapped.model.named_modules() if isinstance(module, _Block)]
        quantized, _ = AutoRound(
            wrapped.model,
            tokenizer=wrapped.tokenizer,
            scheme="W4A16",
            iters=_ITERATIONS,
            device_map="cpu",
            dataset=loader(batches),
            seqlen=batches[0].shape[1],
            nsamples=sum(map(len, batches)),
            batch_size=8,
            enable_torch_compile=False,
            to_quant_block_names=[blocks],
            layer_config={"inner.head": bits},
            **bits,
        ).quantize()
        return quantized.inner

    return run


def _group(case: Case) -> int:
    return int(case.name.rsplit(" ", 1)[1]) if "groups" in case.name else 0


def loader(batches: list[Tensor]) -> Any:
    """Batches [rows, tokens] as AutoRound and llm-compressor take them."""
    rows = [{"input_ids": row} for batch in batches for row in batch]
    return torch.utils.data.DataLoader(rows, batch_size=8)  # type: ignore[arg-type]


class _Block(nn.Module):
    """Calls a block as those of transformers are called."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.block(hidden_states)


class _ModuleList(nn.ModuleList):
    """Blocks in a list, which is where AutoRound looks for them, by the name of the class."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        for block in self:
            hidden_states = block(hidden_states)
        return hidden_states


class _Wrapped:
    """A copy of a language model as a model of transformers, with a tokenizer that is never used."""

    def __init__(self, model: Any) -> None:
        from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

        class Config(PretrainedConfig):
            model_type = "bytes"

        class Model(PreTrainedModel):
            config_class = Config
            _no_split_modules: ClassVar[list[str]] = []

            def __init__(self, config: Config, inner: nn.Module) -> None:
                super().__init__(config)
                self.inner = inner

            def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
                return self.inner(input_ids)

        class Tokenizer(PreTrainedTokenizerBase):
            pad_token = None

        AutoConfig.register("bytes", Config, exist_ok=True)
        inner = copy.deepcopy(model)
        inner.blocks = _ModuleList([_Block(block) for block in inner.blocks])
        config = Config()
        config._name_or_path = tempfile.mkdtemp()
        config.save_pretrained(config._name_or_path)
        self.model, self.tokenizer = Model(config, inner).eval(), Tokenizer()


def _wrapped(model: nn.Module) -> _Wrapped:
    return _Wrapped(model)
