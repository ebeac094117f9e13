"""A float model whose weights are elsewhere, and come for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fakequant.delivery.folder import class_of
from fakequant.errors import CheckpointError, ConfigError
from fakequant.model.state.snapshots import Made
from fakequant.nn.paths import join
from fakequant.text import listed, module_name

_CURE = "give a model on the meta device with load="
Load = Callable[[str], Mapping[str, Tensor]]
"""The tensors of the module at a path by their names in it; those of "" may be the ones outside of the blocks alone."""


class ModelSource:
    """A model on the meta device, and where its weights come from.

    Args:
        model: in float.
        load: gives the tensors of a module.
        files: the files that hold them, each with its size and the time of its last change.
    """

    def __init__(self, model: nn.Module, load: Load, files: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.model, self._load, self.files = model, load, files or {}

    @classmethod
    def of(cls, source: Any, load: Load | None, copies: Path) -> ModelSource:
        """The model of a folder of transformers, or one on the meta device with a function that loads it.

        Args:
            source: the folder or the model.
            load: of the model.
            copies: a folder for tensors that files hold in another form, such as experts one by one.

        Raises:
            ConfigError: a model with weights, or one without a function.
            CheckpointError: no folder of transformers, or the package or Accelerate is missing.
        """
        if isinstance(source, nn.Module):
            if load is None or not all(parameter.is_meta for parameter in source.parameters()):
                raise ConfigError(
                    "improve_folder takes a folder, or a model whose parameters are all on the meta device with load=, "
                    "which gives the tensors of a block; improve a model that is in memory by fakequant.ptq.improve"
                )
            return cls(source, load)
        return cls(*_opened(Path(source), copies))

    @contextmanager
    def loaded(self, path: str, module: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[None]:
        """A context in which a module has its weights; modules in it may stay empty.

        Raises:
            CheckpointError: a tensor that is not given, or that has another shape.
        """
        places, given = _empty(module, {*without}), self._given(path)
        filled = [(shared, tensor, _filled(path, shared, tensor, given)) for tensor, shared in places]
        try:
            for shared, _, values in filled:
                for _, held, own in shared:
                    held[own] = values
            yield
        finally:
            for shared, tensor, _ in filled:
                for _, held, own in shared:
                    held[own] = tensor

    def tensor(self, path: str, name: str) -> Tensor:
        """A tensor of a module by its name in it."""
        with _named_errors(path):
            return self._given(path)[name]

    def _given(self, path: str) -> Mapping[str, Tensor]:
        with _named_errors(path):
            given = self._load(path)
        if not isinstance(given, Mapping):
            raise CheckpointError(f"load({path!r}) gave a {type(given).__name__}; it must give tensors by name")
        return given


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """A context in which errors of what loads a module, such as those of a missing shard, name the module."""
    try:
        yield
    except Exception as error:  # of the user's function, or of files: any
        raise CheckpointError(
            f"the tensors of {module_name(path)} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


_Places = list[tuple[str, dict[str, Any], str]]
"""The places of a tensor in a module, several where it is tied: its name, the dict that holds it, and its key there."""


def _empty(module: nn.Module, without: set[nn.Module]) -> list[tuple[Tensor, _Places]]:
    """The tensors of a module that have no values, with their places."""
    found: dict[int, tuple[Tensor, _Places]] = {}
    for name, part in _named(module, without):
        for held in (part._parameters, part._buffers):
            for own, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    found.setdefault(id(tensor), (tensor, []))[1].append((join(name, own), held, own))
    return [*found.values()]


def _filled(path: str, shared: _Places, tensor: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """The values of a tensor; of those that are tied, one name is enough."""
    names = [name for name, *_ in shared]
    name = next((name for name in names if name in given), None)
    if name is None:
        raise CheckpointError(f"{module_name(path)} has no values for {listed(names)}")
    with _named_errors(path):
        values = given[name].detach()
    if values.shape != tensor.shape:
        raise CheckpointError(
            f"{join(path, name)} has the shape {[*values.shape]}, and the model expects {[*tensor.shape]}"
        )
    values = values.to(tensor.dtype, copy=True)  # choosing writes into it
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _named(module: nn.Module, without: set[nn.Module], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is not None and child not in without:
            yield from _named(child, without, f"{path}.{name}" if path else name)


def _opened(path: Path, copies: Path) -> tuple[nn.Module, Load, dict[str, tuple[int, int]]]:
    """The model of a folder with its weights left in the files."""
    cls = class_of(path, _CURE)
    try:
        from accelerate.hooks import remove_hook_from_module
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path} is opened by Accelerate, which is not installed; run pip install accelerate, or {_CURE}"
        ) from error
    try:
        model = cls.from_pretrained(path, dtype="auto", device_map={"": "disk"}, offload_folder=copies)
    except Exception as error:  # of transformers, safetensors or Accelerate: any
        raise CheckpointError(f"{path} cannot be opened by transformers: {type(error).__name__}: {error}") from error
    kept = {
        join(name, own): (hook.weights_map, own)
        for name, module in model.named_modules()
        if getattr(hook := vars(module).get("_hf_hook"), "weights_map", None) is not None
        for own in (*module._parameters, *module._buffers)
    }
    remove_hook_from_module(model, recurse=True)

    def load(path: str) -> Mapping[str, Tensor]:
        start = f"{path}." if path else ""
        return Made(
            {
                name.removeprefix(start): partial(weights.__getitem__, own)
                for name, (weights, own) in kept.items()
                if name.startswith(start) and own in weights
            }
        )

    stats = {one.name: one.stat() for one in sorted(path.glob("*.safetensors"))}
    return model.eval(), load, {name: (one.st_size, one.st_mtime_ns) for name, one in stats.items()}
