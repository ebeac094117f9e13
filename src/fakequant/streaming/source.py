"""A float model whose weights are elsewhere, and come for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fakequant.delivery.folder import Folder
from fakequant.errors import CheckpointError, ConfigError
from fakequant.nn.paths import join
from fakequant.text import listed, module_name

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
        return self._given(path)[name]

    def _given(self, path: str) -> Mapping[str, Tensor]:
        given = self._load(path)
        if not isinstance(given, Mapping):
            raise CheckpointError(f"load({path!r}) gave a {type(given).__name__}; it must give tensors by name")
        return given


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


class _Hooked(Mapping[str, Tensor]):
    """The tensors of a module that Accelerate leaves in files, read at each access.

    Args:
        weights: by the path of a module, its own tensors.
        path: of the module.
    """

    def __init__(self, weights: Mapping[str, Mapping[str, Tensor]], path: str) -> None:
        self._weights, self._path = weights, path

    def __getitem__(self, name: str) -> Tensor:
        where, _, own = join(self._path, name).rpartition(".")
        return self._weights[where][own]

    def __contains__(self, name: object) -> bool:
        where, _, own = join(self._path, str(name)).rpartition(".")
        return where in self._weights and own in self._weights[where]

    def __iter__(self) -> Iterator[str]:
        own = self._weights if not self._path else (name for name in self._weights if name.startswith(self._path))
        return (join(where, name)[len(self._path) :].lstrip(".") for where in own for name in self._weights[where])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _opened(path: Path, copies: Path) -> tuple[nn.Module, Load, dict[str, tuple[int, int]]]:
    """The model of a folder with its weights left in the files."""
    architectures = Folder(path).config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    try:
        import transformers
        from accelerate.hooks import remove_hook_from_module
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path} is of a model of transformers, and {error.name} is not installed; install it, or give a model on "
            "the meta device with load="
        ) from error
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None or not hasattr(cls, "config_class"):
        raise CheckpointError(
            f"{path} names the architecture {name!r:.80}, which transformers {transformers.__version__} does not have; "
            "give a model on the meta device with load="
        )
    try:
        model = cls.from_pretrained(path, dtype="auto", device_map={"": "disk"}, offload_folder=copies)
    except Exception as error:  # of transformers, safetensors or Accelerate: any
        raise CheckpointError(f"{path} cannot be opened by transformers: {type(error).__name__}: {error}") from error
    hooks = {name: vars(one).get("_hf_hook") for name, one in model.named_modules()}
    weights = {name: hook.weights_map for name, hook in hooks.items() if getattr(hook, "weights_map", None) is not None}
    remove_hook_from_module(model, recurse=True)
    stats = {one.name: one.stat() for one in sorted(path.glob("*.safetensors"))}
    states = {name: (one.st_size, one.st_mtime_ns) for name, one in stats.items()}
    return model.eval(), lambda path: _Hooked(weights, path), states
