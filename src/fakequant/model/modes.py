"""What a model's quantizers and modules do for a while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import nn

from fakequant.data.arguments import Metric, check_model, measured
from fakequant.nn.contexts import cached_weights
from fakequant.nn.quantizer import Mode, Quantizer, quantizers
from fakequant.restore import attributes_of, restore_after

_KEPT = "mode", "seen"
"""What comes back of a quantizer: its mode, and the mark of the weight of its last call, which calls in between set."""


@contextmanager
def modes(model: nn.Module, choose: Callable[[str, Quantizer], Mode]) -> Iterator[None]:
    """Set the mode of every quantizer by its name for a while."""
    found = quantizers(model)
    with restore_after(attributes_of(found.values(), *_KEPT)):
        for name, quantizer in found.items():
            quantizer.mode = choose(name, quantizer)
        yield


def disabled(model: nn.Module) -> Any:
    """A context in which all quantizers are off: the model computes in float.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> with disabled(model):
    ...     y = model(torch.ones(1, 4))
    """
    check_model(model, "disabled", "with disabled(model):")
    return off(quantizers(model).values())


@contextmanager
def off(found: Collection[Quantizer]) -> Iterator[None]:
    """A context in which quantizers are off, for functions that enter it often: they list them once."""
    with restore_after(attributes_of(found, *_KEPT)):
        for quantizer in found:
            quantizer.mode = Mode.OFF
        yield


_EAGER: dict[object, Any] = {}
"""For each running `not_compiled`, torch's stance before the first of them: there is one for all threads."""
_EAGER_LOCK = RLock()  # one that an interrupted thread may take again


@contextmanager
def not_compiled() -> Iterator[None]:
    """A context in which models run as written.

    A compiled graph calls no new hooks, and `torch.cond`, loops, `torch.map` and `flex_attention`, which compile what
    they call, fail with hooks and calibrators. Torch's compiler is imported here (2 s), because they import it later.
    Contexts of several threads may overlap, and an interrupt may end an inner one after an outer one.
    """
    from torch._dynamo import eval_frame

    def restore() -> None:
        with _EAGER_LOCK:
            before = _EAGER.get(this)
            if before is not None and len(_EAGER) == 1:
                eval_frame._set_stance(before)
            _EAGER.pop(this, None)

    this = object()
    with restore_after(restore):
        with _EAGER_LOCK:
            _EAGER[this] = next(iter(_EAGER.values()), eval_frame._stance)
            torch.compiler.set_stance("force_eager")
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context for runs of a model: as written, in eval mode; each module's own mode comes back."""
    with not_compiled(), in_eval_mode(model):
        yield


def exact_products() -> Any:
    """A context in which products of float32 are IEEE's, whatever the user allowed: TF32 has 10 bits.

    Checks that a function stays the same, and the sums and solutions of `improve`, need all 24.
    """
    of_torch: Any = torch.backends
    kinds = (of_torch.cuda.matmul, of_torch.cudnn.conv, of_torch.cudnn.rnn)
    kinds += (of_torch.mkldnn.matmul, of_torch.mkldnn.conv, of_torch.mkldnn.rnn)
    return _set_for_a_while(kinds, "fp32_precision", "ieee")


@contextmanager
def _set_for_a_while(objects: Collection[Any], name: str, value: Any) -> Iterator[None]:
    with restore_after(attributes_of(objects, name)):
        for one in objects:
            setattr(one, name, value)
        yield


def score_of(metric: Metric, model: nn.Module) -> float:
    """What a metric gives for a model in eval mode, without gradients, with each weight quantized once."""
    with evaluating(model), cached_weights(model), torch.no_grad():
        return measured(metric, model)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """A context in which every module is in eval mode; each module's own mode comes back."""
    # Not those in eval mode: an interrupt may end this after an outer context, see `restore_on_error`.
    training = [module for module in model.modules() if module.training]
    with restore_after(attributes_of(training, "training")):
        model.eval()
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """A context in which every module is in training mode; each module's own mode comes back.

    Batch normalisations stay in eval mode: one sample may have no variance, for which they raise.
    """
    with restore_after(attributes_of(model.modules(), "training")):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        yield
