"""Train a quantized model towards the outputs of a float model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from inspect import unwrap
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.data.batches import Mask, TokenMask
from fakequant.data.digest import digest
from fakequant.errors import ConfigError, nearest, warn_user
from fakequant.model.run.outputs import float_tensors
from fakequant.model.weights import disabled, in_eval_mode
from fakequant.restore import restore_after

_IGNORED = -100
"""The label that torch's losses ignore."""
_MUCH = 2**30
"""The bytes of stored outputs at which a warning is given if no batch came again."""
_MASK = "attention_mask"
"""The key of the mask in batches of tokenizers."""


@dataclass(frozen=True)
class Distillation:
    """A loss: the distance of a model's outputs from a teacher's outputs, with a weight beside the user's loss.

    The loss is (1 - weight) times the user's loss plus weight times the distance from the teacher. The distance is the
    Kullback-Leibler divergence of the softmax of the logits, or with `features` the mean squared error of the outputs
    of these modules, summed over the modules.

    Args:
        teacher: a module that takes the same batches. "self" is the trained model with its quantizers off: this teacher
            takes no memory, and its weights move with the training. A teacher is in eval mode and without gradients.
        weight: the weight of the distance in the loss, above 0 and at most 1.
        temperature: the number T that divides logits; the divergence is multiplied by T^2, so that gradients keep their
            size (Hinton et al., arXiv 1503.02531).
        features: the names of modules that the model and the teacher both have.
        logits: a function that returns the logits in a model's output; by default the only tensor, or `outputs.logits`.
        axis: the axis of the classes in the logits. By default it is the axis that integer labels lack: axis 1 for maps
            [N, classes, H, W] with labels [N, H, W], as for `cross_entropy`, the last axis for tokens. Without integer
            labels it is the last axis, if there are at most three.
        mask: which tokens count, as for `calibrate`. Tokens whose integer label is not a class, such as -100 or 255,
            never count. By default all other tokens count; in a batch without integer labels, tokens that
            "attention_mask" masks do not. An output that does not begin with the mask's axes counts as a whole. If the
            loss of a causal model compares an output with the next label, the next label decides here, too.
        keep: whether to store the teacher's outputs for each batch in memory, for when the same batch comes again. A
            batch is recognised by a digest of the teacher's inputs: give a list of batches, because a loader that
            shuffles or changes its samples never repeats a batch. A change of the teacher's weights through `.data` is
            not noticed. At 1 GiB a warning is given if no batch came again.

    Raises:
        ConfigError: the weight or the temperature is out of range, the teacher has a wrong type, or `keep` is used with
            the teacher "self".

    >>> Distillation("self", weight=0.9, temperature=2.0).weight
    0.9
    """

    teacher: nn.Module | Literal["self"] = "self"
    weight: float = 0.5
    temperature: float = 1.0
    features: tuple[str, ...] = ()
    logits: Callable[[Any], Tensor] | None = None
    axis: int | None = None
    mask: Mask | None = None
    keep: bool = False
    _kept: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.teacher, nn.Module) or self.teacher == "self"):
            raise ConfigError(f'the teacher must be a module, or "self" for the model itself, got {self.teacher!r}')
        if not 0 < self.weight <= 1:
            raise ConfigError(f"Distillation(weight={self.weight}): must be above 0 and at most 1")
        if not self.temperature > 0:
            raise ConfigError(f"Distillation(temperature={self.temperature}): must be positive")
        if self.keep and self.teacher == "self":
            raise ConfigError(
                'Distillation("self", keep=True): this teacher changes in training; give a float model as the teacher'
            )
        TokenMask(self.mask)
        if isinstance(self.features, str):
            raise ConfigError(f"Distillation(features={self.features!r}): must be a tuple, as ({self.features!r},)")

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if the model or the teacher lacks a module of `features`."""
        for role, module in (("model", model), ("teacher", self._teacher_of(model))):
            names = [name for name, _ in module.named_modules() if name]
            for feature in self.features:
                if feature not in names:
                    raise ConfigError(f"the {role} has no module {feature!r} for features={nearest(feature, names)}")

    def masks(self, batch: Any) -> list[Tensor]:
        """A list with the mask of a batch's tokens, bool [batch, tokens]; empty if the batch has no mask."""
        found = []
        if self.mask is not None:
            found.append(TokenMask(self.mask).mask(batch))
        else:
            held = batch.get(_MASK) if isinstance(batch, Mapping) else None
            # Masks of scores are floats or have more axes.
            if isinstance(held, Tensor) and held.dim() == 2 and not held.is_floating_point():
                found.append(held.bool())
        return [mask for mask in found if mask is not None]

    def student(
        self, model: nn.Module, forward: Callable[[nn.Module], Any], masks: Sequence[Tensor] = (), labels: Any = None
    ) -> tuple[Any, Tensor]:
        """The outputs of the trained model for a batch, and their distance from the teacher's outputs.

        Args:
            forward: a function that calls a model with the batch.
            masks: the masks of the batch, see `masks`.
            labels: the targets of the batch, if they are known.

        Raises:
            ConfigError: the shapes of the model and the teacher differ; `mask` fits no compared tensor; or the axis of
                the classes is not known.
        """
        outputs, own = self._run(model, forward)
        return outputs, self.distance(model, own, forward, masks, labels)

    def distance(
        self,
        model: nn.Module,
        own: Sequence[Tensor],
        forward: Callable[[nn.Module], Any],
        masks: Sequence[Tensor] = (),
        labels: Any = None,
    ) -> Tensor:
        """The distance between `own`, tensors that the trained model returned for a batch, and the teacher's tensors.

        Args:
            own: the tensors that the trained model returned, from `compared`.
            forward: a function that calls a model with the batch.
            masks, labels: as for `student`.

        Raises:
            ConfigError: for the reasons of `student`.
        """
        teacher = self._teacher_of(model)
        with ExitStack() as contexts:
            contexts.enter_context(torch.no_grad())
            contexts.enter_context(in_eval_mode(teacher))
            if teacher is model:
                contexts.enter_context(disabled(model))
            wanted = self._wanted(teacher, forward)
        for x, y, name in zip(own, wanted, self.features or ("the logits",), strict=True):
            if x.shape != y.shape:
                raise ConfigError(f"{name}: shape {list(x.shape)} in the model, but {list(y.shape)} in its teacher")
        axis = 0 if self.features else self._axis(own[0], labels)
        if self.features:
            each = [(x - y.to(x.dtype)).square() for x, y in zip(own, wanted, strict=True)]
        else:
            student = F.log_softmax(own[0].float() / self.temperature, axis)
            target = F.log_softmax(wanted[0].float() / self.temperature, axis)
            each = [F.kl_div(student, target, reduction="none", log_target=True).sum(axis) * self.temperature**2]
        if isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.dtype is torch.bool):
            # No loss of torch counts integer labels that are no classes.
            counted = (labels >= 0) & (labels < (math.inf if self.features else own[0].shape[axis]))
            masks = [*masks] if bool(counted.all()) else [counted, *masks]
        least = 3 if self.features else 1  # [batch, features] may be as long as [batch, tokens]
        fitting = [[mask for mask in masks if x.dim() >= least and x.shape[: mask.dim()] == mask.shape] for x in each]
        if self.mask is None:  # the first one: of an encoder and a decoder, the mask of tokens may be the other's
            fitting = [found[:1] for found in fitting]
        elif not any(masks[-1] is mask for found in fitting for mask in found):
            shapes = ", ".join(str(list(x.shape)) for x in each)
            raise ConfigError(
                f"the mask has shape {list(masks[-1].shape)}, but no compared tensor begins with these axes: {shapes}; "
                "give a mask with the axes [batch, tokens] of a compared tensor"
            )
        means = list[Tensor]()
        for x, found in zip(each, fitting, strict=True):
            if found:
                kept = torch.ones(x.shape, dtype=torch.bool, device=x.device)
                for mask in found:
                    kept &= mask.to(x.device).view(*mask.shape, *(1 for _ in x.shape[mask.dim() :]))
                x = x[kept]
            means.append(x.sum() / max(x.numel(), 1))
        return torch.stack(means).sum()

    def _teacher_of(self, model: nn.Module) -> nn.Module:
        return self.teacher if isinstance(self.teacher, nn.Module) else model

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[dict[str, Tensor]]:
        """A context that yields the first float tensor that each module of `features` returns in its last call."""
        found: dict[str, Tensor] = {}

        def keep(name: str, output: Any) -> None:
            if tensors := float_tensors(output):
                found[name] = tensors[0]

        hooks: list[Any] = []
        with restore_after(lambda: [hook.remove() for hook in hooks]):
            for name in self.features:
                module = model.get_submodule(name)
                hooks.append(module.register_forward_hook(lambda _, __, output, name=name: keep(name, output)))
            yield found

    def compared(self, outputs: Any, seen: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors to compare: the logits in the outputs of a model, or the features that `watched` saw."""
        if self.logits is not None and not self.features:
            return [self.logits(outputs)]
        if not self.features:
            found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
            tensors = [found] if isinstance(found, Tensor) else float_tensors(outputs)
            if len(tensors) != 1:
                raise ConfigError(
                    f"an output of type {type(outputs).__name__} holds {len(tensors)} float tensors, but distillation "
                    "needs one; give a function of the output as Distillation(logits=...), or names of modules as "
                    "features="
                )
            return tensors
        if missing := [name for name in self.features if name not in seen]:
            raise ConfigError(
                f"the module {missing[0]} of features= returned no float tensor for this batch; name modules that "
                "every batch calls"
            )
        return [seen[name] for name in self.features]

    def _run(self, model: nn.Module, forward: Callable[[nn.Module], Any]) -> tuple[Any, list[Tensor]]:
        """The outputs of a model, and the tensors that are compared."""
        with self.watched(model) as seen:
            outputs = forward(model)
        return outputs, self.compared(outputs, seen)

    def _wanted(self, teacher: nn.Module, forward: Callable[[nn.Module], Any]) -> list[Tensor]:
        """The tensors of the teacher for a batch: computed now, or with `keep` stored by an earlier call."""
        if not self.keep:
            return self._run(teacher, forward)[1]
        asked = _Asked(teacher)
        forward(asked)
        key = digest([asked.given, [(p.data_ptr(), p._version) for p in (*teacher.parameters(), *teacher.buffers())]])
        if key in self._kept:
            self._counts["again"] += 1
        else:
            # Copies: an output may be a view of the batch, or of more than is kept.
            self._kept[key] = [x.clone() for x in self._run(teacher, forward)[1]]
            before = self._counts["bytes"]
            self._counts["bytes"] += sum(x.nbytes for x in self._kept[key])
            if before < _MUCH <= self._counts["bytes"] and not self._counts["again"]:
                warn_user(
                    f"Distillation(keep=True) stores {self._counts['bytes'] / 2**30:.2g} GiB for {len(self._kept)} "
                    "batches, but no batch came again yet; if the loader shuffles or changes its samples, none will: "
                    "give list(loader), or leave out keep"
                )
        return self._kept[key]

    def _axis(self, logits: Tensor, labels: Any) -> int:
        """The axis of the classes in logits."""
        if self.axis is not None:
            return self.axis
        shape, known = [*logits.shape], [*labels.shape] if isinstance(labels, Tensor) else None
        fits = {axis for axis in (1, -1) if shape[:axis] + (shape[axis + 1 :] if axis > 0 else []) == known}
        if isinstance(labels, Tensor) and (known == shape or shape[1:] == [1]):
            fits = set[int]()
            if known == shape and len(shape) > 1 and labels.is_floating_point() and bool((labels >= 0).all()):
                totals = {axis: labels.double().sum(axis) for axis in (1, -1)}
                fits = {axis for axis, x in totals.items() if torch.allclose(x, torch.ones_like(x), atol=1e-2)}
            if not fits or shape[1:] == [1]:
                raise ConfigError(
                    f"targets of shape {known} are not probabilities of classes, but distillation compares the softmax "
                    "of outputs: give Distillation(features=...), or axis= if outputs are logits"
                )
        if len(shape) < 3 or (not fits and len(shape) == 3):
            return -1
        if len(fits) != 1:
            raise ConfigError(
                f"the labels do not show which axis of the logits {shape} has the classes; pass Distillation(axis=1) "
                "for maps [N, classes, ...], or axis=-1 for tokens [..., classes]"
            )
        return fits.pop()


class _Asked(nn.Module):
    """A stand-in for the teacher that records the arguments of its calls, and computes nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.given: list[Any] = []
        """For each call, its arguments, the devices of their tensors, and the dtypes of autocast."""

        @wraps(model.forward)  # whose signature says which items of a batch are its arguments
        def note(*args: Any, **kwargs: Any) -> None:
            devices = [x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            types = sorted({x.type for x in (*devices, *(p.device for p in model.parameters()))})
            casts = [(own, torch.get_autocast_dtype(own)) for own in types if torch.is_autocast_enabled(own)]
            self.given.append((args, kwargs, devices, casts))

        self.forward = note


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model's own loss compares each output with the label of the next token, as in transformers."""
    whole: Any = model
    model = whole.get_base_model() if hasattr(whole, "get_base_model") else whole  # of peft
    names = getattr(unwrap(type(model).forward), "__code__", shifts_labels.__code__).co_names
    loss = getattr(model, "loss_function", None) if "loss_function" in names else None
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"


def labels_of_outputs(model: nn.Module, labels: Any, shifted: Any = None) -> Any:
    """The labels that a model's own loss compares with its outputs, each at the position of its output.

    Args:
        shifted: the argument `shift_labels`, if the model got it: these labels are already at the positions of the
            outputs.
    """
    if shifted is not None:
        return shifted
    if not isinstance(labels, Tensor) or not shifts_labels(model):
        return labels
    return F.pad(labels[..., 1:], (0, 1), value=_IGNORED)
