"""Calibration by several processes, and tensors that are sharded over processes, with torch.distributed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, FakeQuantError
from fakequant.memory import offloaded
from fakequant.text import module_name

Item = TypeVar("Item")
Result = TypeVar("Result")


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process may hold a shard."""
    kind = type(tensor)  # the class is asked first, because a proxy of torch.fx has every attribute
    return kind not in (Tensor, nn.Parameter) and issubclass(kind, Tensor) and hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor with all its values; a DTensor is gathered, so all its processes must call this.

    >>> tensor = torch.ones(2)
    >>> gathered(tensor) is tensor
    True
    """
    return cast("Any", tensor).full_tensor() if is_sharded(tensor) else tensor


def is_moved(model: nn.Module) -> bool:
    """Whether some weights are in memory only during a call, because they are sharded or hooks offload them."""
    return bool(first_sharded(model) or offloaded(model))


def first_sharded(model: nn.Module) -> str:
    """The path of the first sharded parameter. Without any, the first module of `fully_shard`; without both, ""."""
    names = (name for name, parameter in model.named_parameters() if is_sharded(parameter))
    modules = model.named_modules()
    roots = (module_name(path) for path, one in modules if _is_fully_sharded(one))
    return next(names, "") or next(roots, "")


def parallel_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes over which `parallelize_module` split layers of a model; None if it split no layer.

    Parameters that `fully_shard` splits are whole in every call, and do not count.
    """
    for name, axes in parallel_parameters(model).items():
        return cast("Any", model.get_parameter(name)).device_mesh.get_group(axes[-1])
    return None


def parallel_parameters(model: nn.Module) -> dict[str, list[int]]:
    """For the name of each parameter that `parallelize_module` split: the axes of the mesh over which it is split."""
    gathered = {id(p) for module in model.modules() if _is_fully_sharded(module) for p in module.parameters()}
    found: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_sharded(parameter):
            mesh, placements = cast("Any", parameter).device_mesh, cast("Any", parameter).placements
            if id(parameter) not in gathered:
                found[name] = [*range(mesh.ndim)]
            elif mesh.ndim > 1 and not placements[0].is_replicate():
                # Over two axes `fully_shard` alone makes copies along the first.
                found[name] = [mesh.ndim - 1]
    return found


def _is_fully_sharded(module: nn.Module) -> bool:
    return hasattr(type(module), "set_reshard_after_forward")


def refuse_sharded(model: nn.Module, action: str, *, offloading: bool = True) -> None:
    """Raise ConfigError if parameters of a model are sharded (`fully_shard`, `parallelize_module`) or offloaded.

    Args:
        model: any module.
        action: the refused action as a verb, for example "export".
        offloading: whether to refuse weights that hooks of Accelerate hold outside of the model, too.

    Raises:
        ConfigError: some parameters are sharded or offloaded.
    """
    if offloading:
        refuse_offloaded(model, action)
    if name := first_sharded(model):
        raise ConfigError(
            f"the weights are sharded over processes, the first is {name}; {action} the model before fully_shard, "
            "or gather the weights by torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "StateDictOptions(full_state_dict=True) into a model that is not sharded"
        )


def refuse_offloaded(model: nn.Module, action: str) -> None:
    """Raise ConfigError if hooks of Accelerate hold parameters outside of the model, see `refuse_sharded`."""
    if elsewhere := offloaded(model):
        raise ConfigError(
            f"{len(elsewhere)} tensors are offloaded by hooks of Accelerate, the first is {elsewhere[0]}, and changes "
            f"of the tensors would be lost; {action} the model before it is offloaded, or load it without device_map"
        )


def processes_of(model: nn.Module, group: Any) -> dist.ProcessGroup | None:
    """Return the processes that calibrate a model together, or None if this process works alone.

    Args:
        model: the model; the default group is the one of DistributedDataParallel, or of the mesh of sharded parameters.
        group: a process group, False for none, or None for the default.

    Raises:
        ConfigError: `group` has another type; torch.distributed is not initialised; or `group` is False although
            `parallelize_module` split layers over processes.
    """
    parallel = parallel_group(model) if group is False else None
    if parallel is not None and parallel.size() > 1:
        raise ConfigError(
            "parallelize_module split layers over processes, so that a process sees parts of tensors, and group=False "
            "would give each process a different range; leave group= out, or give the group of all processes"
        )
    if group is False or not dist.is_available() or not dist.is_initialized():
        if group is not False and group is not None:
            raise ConfigError("group= was passed, but torch.distributed is not initialised; call init_process_group")
        return None
    if group is None:
        sharded = next((cast("Any", p) for p in model.parameters() if is_sharded(p)), None)
        if is_data_parallel(model):
            group = getattr(model, "process_group", None)
        elif sharded is not None and sharded.device_mesh.ndim == 1:
            group = sharded.device_mesh.get_group()
        elif sharded is not None and sharded.device_mesh.size() == dist.get_world_size():
            group = dist.group.WORLD
    if group is None:
        if dist.get_world_size() > 1:
            warnings.warn(
                f"torch.distributed has {dist.get_world_size()} processes, and each works alone, so their "
                "scales may differ; pass group=torch.distributed.group.WORLD to merge their data, or group=False to "
                "keep them separate",
                CalibrationWarning,
                stacklevel=3,
            )
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"group must be a process group of torch.distributed, False or None, got {group!r}")
    return group


def all_processes() -> dist.ProcessGroup | None:
    """All processes of torch.distributed; None if this process is alone."""
    started = dist.is_available() and dist.is_initialized()
    return dist.group.WORLD if started and dist.get_world_size() > 1 else None


def process_number() -> int:
    """The rank of this process among all processes of torch.distributed; 0 if this process is alone.

    >>> process_number()
    0
    """
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_data_parallel(model: nn.Module) -> bool:
    """Whether a model is wrapped in DistributedDataParallel."""
    return isinstance(model, nn.parallel.DistributedDataParallel)


def gather(value: Result, group: dist.ProcessGroup) -> list[Result]:
    """Return the values of all processes of a group, in the order of their ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


class Ranks:
    """A context in which processes exchange values; at the next exchange an error of one process is raised in all.

    Args:
        group: the processes; None for this process alone.
        error: the class of the error if another process failed, or has another value.

    >>> with Ranks(None) as processes:
    ...     processes.all(3)
    [3]
    """

    def __init__(self, group: dist.ProcessGroup | None, error: type[FakeQuantError] | None = None) -> None:
        self.group = group
        self._failed, self._differ = error or CalibrationError, error or ConfigError
        self._is_told = False
        """Whether not to send an error to the other processes, because they raised it, too, or cannot receive it."""

    def all(self, value: Result) -> list[Result]:
        """The values of all processes, in the order of their ranks.

        Raises:
            CalibrationError: another process failed; see `error`.
        """
        if self.group is None:
            return [value]
        self._is_told = True
        answers = gather((None, value), self.group)
        for rank, (failure, _) in enumerate(answers):
            if failure is not None:
                raise self._failed(f"the process of rank {rank} failed, and nothing was changed here either: {failure}")
        self._is_told = False
        return [cast("Result", answer) for _, answer in answers]

    def same(self, value: str, what: str) -> None:
        """Check that all processes have the same value.

        Args:
            value: the value of this process.
            what: the verb and object of the message if they differ, such as "save different models".

        Raises:
            ConfigError: the values differ; see `error`.
        """
        values = self.all(value)
        if other := [rank for rank, one in enumerate(values) if one != values[0]]:
            raise self._differ(
                f"the processes {what}: rank {other[0]} differs from rank 0; give all processes the same"
            )

    def in_step(self, items: Iterable[Result]) -> Iterator[Result]:
        """The items, as long as all processes have an item: each call of a sharded model needs all processes.

        Raises:
            CalibrationError: some processes have fewer items than others, or another process failed.
        """
        count, own, end = 0, iter(items), object()
        while True:
            item = next(own, end)
            has = self.all(item is not end)
            if not any(has):
                return
            if not all(has):
                raise CalibrationError(
                    f"the process of rank {has.index(False)} has {count} batches, but others have more. The weights "
                    "are sharded, and each call of the model needs all processes: give all processes equally many "
                    "batches"
                )
            count += 1
            yield cast("Result", item)

    def share(self, items: Iterable[Item], work: Callable[[Item, Ranks], Result]) -> Iterator[Result]:
        """The results of a function for all items, which the processes divide; tensors in results may be on the CPU.

        Each round takes an item for each process; then the processes exchange the results. If a round has a single
        item, all processes work on it, and may divide its parts.

        Args:
            items: the items, of the same number in all processes.
            work: a function of an item, and of the processes that work on it.
        """
        size, rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        given = iter(items)
        while True:
            own, count, item = list[Item](), 0, None
            for item in islice(given, size):
                own, count = [item] if count in (0, rank) else own, count + 1
            item = None  # frees those of other processes
            if not count:
                return
            if count == 1:
                yield work(own[0], self)
                continue
            found = [work(own[0], Ranks(None))] if rank < count else []
            yield from (answer for answers in self.all(tree_map_only(Tensor, Tensor.cpu, found)) for answer in answers)

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """A context for an exchange by other means: an error is raised in this process, and not sent to the others."""
        try:
            yield
        except BaseException:
            self._is_told = True
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.all(None)  # so that an error in the last part is heard, too
        elif self.group is not None and not self._is_told:
            gather((f"{type(error).__name__}: {error}", None), self.group)
