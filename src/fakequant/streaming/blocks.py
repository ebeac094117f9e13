"""The blocks of a model that run one after the other, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.data.batches import KeptBatches
from fakequant.errors import ConfigError
from fakequant.nn.paths import join
from fakequant.text import listed

See = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the number of a block and the arguments of a call; returns the block's output."""


class BlockCall:
    """A call of a block: the hidden states that it gets, and its other arguments.

    Args:
        hidden: the first argument, or the one that has a name.
        name: of the hidden states; "" where they are the first argument.
        args: the other positional arguments.
        kwargs: the other named arguments.
        mask: the unmasked tokens, bool [batch, tokens]; None if all count.
    """

    def __init__(
        self, hidden: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
    ) -> None:
        self.hidden, self.name, self.args, self.kwargs, self.mask = hidden, name, args, kwargs, mask

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None) -> BlockCall:
        """The call with these arguments.

        Raises:
            ConfigError: they have no float tensor.
        """
        if args and _is_float(args[0]):
            return cls(args[0], "", args[1:], kwargs, mask)
        name = next((name for name, value in kwargs.items() if _is_float(value)), None)
        if args or name is None:
            raise ConfigError("a block is called without hidden states as its first argument; name other blocks=")
        return cls(kwargs[name], name, (), {key: value for key, value in kwargs.items() if key != name}, mask)

    def with_hidden(self, hidden: Tensor) -> BlockCall:
        """The same call with other hidden states."""
        return BlockCall(hidden, self.name, self.args, self.kwargs, self.mask)

    def run(self, block: nn.Module) -> Any:
        """What a block gives."""
        if self.name:
            return block(**{self.name: self.hidden}, **self.kwargs)
        return block(self.hidden, *self.args, **self.kwargs)


def blocks_of(model: nn.Module, name: str | None) -> dict[str, nn.Module]:
    """The items of the list of modules that holds most parameters, or of a named one, by their paths.

    Raises:
        ConfigError: there is none, or a module is in it twice.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    >>> list(blocks_of(model, None))
    ['layers.0', 'layers.1']
    """
    lists = {path: one for path, one in model.named_modules() if isinstance(one, (nn.ModuleList, nn.Sequential))}
    if name is not None and name not in lists:
        raise ConfigError(f"the model has no list of modules {name!r} for blocks=; it has {listed([*lists])}")
    if not lists:
        raise ConfigError("the model has no list of modules whose items could be its blocks")
    chosen = max(lists, key=lambda path: _size(lists[path])) if name is None else name
    found = {join(chosen, key): block for key, block in lists[chosen].named_children()}
    if len(set(found.values())) < len(lists[chosen]):
        raise ConfigError(f"{chosen} holds a block twice, which is called with the weights of another one")
    return found


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class _Stand(nn.Module):
    """Stands in the place of a block; other attributes are those of the block."""

    def __init__(self, number: int, block: nn.Module, see: See) -> None:
        super().__init__()
        self.__dict__.update(_number=number, _block=block, _see=see)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._see(self._number, args, kwargs)


@contextmanager
def in_place_of(model: nn.Module, blocks: Iterable[str], see: See) -> Iterator[None]:
    """A context in which a function is called in the place of each block."""
    places = [(model.get_submodule(path.rpartition(".")[0])._modules, path.rpartition(".")[2]) for path in blocks]
    own = [modules[key] for modules, key in places]
    try:
        for number, ((modules, key), block) in enumerate(zip(places, own, strict=True)):
            assert block is not None
            modules[key] = _Stand(number, block, see)
        yield
    finally:
        for (modules, key), block in zip(places, own, strict=True):
            modules[key] = block


class Calls(NamedTuple):
    """How a model calls its blocks.

    Attributes:
        of_blocks: for each block its calls by the number of the batch, all with the hidden states of the first block.
        before: the modules that run before the first block, by path.
        as_tuple: whether the model takes the output of a block as the first item of a tuple.
    """

    of_blocks: list[dict[int, BlockCall]]
    before: set[str]
    as_tuple: bool

    def giving(self, hidden: Callable[[], Tensor]) -> See:
        """What stands in the place of blocks, of which the last one gives hidden states."""

        def see(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            last = number == len(self.of_blocks) - 1
            own = hidden() if last else BlockCall.of(args, kwargs, None).hidden
            return (own,) if self.as_tuple else own

        return see


def calls_of(model: nn.Module, blocks: Sequence[str], batches: KeptBatches) -> Calls:
    """The calls of each block for all batches; blocks do not run, and each gives its hidden states on.

    Args:
        model: whose modules outside of the blocks have weights.
        blocks: their paths, in the order of their calls.
        batches: with their masks.

    Raises:
        ConfigError: blocks that run in another order or several times, or that get something from an earlier block
            beside the hidden states.
    """
    first = next(iter(batches.numbered))
    one = _Recorder(model, blocks, batches)
    as_tuple = not one.run(first)
    one.as_tuple = as_tuple
    if as_tuple and not one.run(first):
        raise ConfigError(f"{blocks[1]} gets other hidden states than {blocks[0]}; name other blocks=")
    other = _Recorder(model, blocks, batches, factor=0.5, as_tuple=as_tuple)
    other.run(first)
    for path, own, changed in zip(blocks, one.found, other.found, strict=True):
        if not _same((own[first].args, own[first].kwargs), (changed[first].args, changed[first].kwargs)):
            raise ConfigError(
                f"{path} gets more of an earlier block than its hidden states; improve the model in memory"
            )
    for number in [*batches.numbered][1:]:
        one.run(number)
    return Calls(one.found, one.before, as_tuple)


class _AllSeen(BaseException):
    """Ends the forward pass of a model before its last block."""


class _Recorder:
    """Records the calls of blocks, which do not run.

    Args:
        model, blocks, batches: as for `calls_of`.
        factor: of the hidden states that a block gives.
        as_tuple: whether it gives a tuple.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        batches: KeptBatches,
        factor: float = 1.0,
        as_tuple: bool = False,
    ) -> None:
        self._model, self._blocks, self._batches, self._factor = model, blocks, batches, factor
        self.as_tuple, self.before = as_tuple, set[str]()
        self.found: list[dict[int, BlockCall]] = [{} for _ in blocks]
        self._order, self._present, self._fits = list[int](), 0, True

    def run(self, number: int) -> bool:
        """Record the calls for a batch; whether all blocks got hidden states of one shape.

        Raises:
            ConfigError: blocks are called in another order than that of their list.
        """
        self._order.clear()
        self._present, self._fits, hooks = number, True, []
        try:
            for path, module in self._model.named_modules():
                hooks.append(module.register_forward_pre_hook(lambda _module, _args, path=path: self._entered(path)))
            with in_place_of(self._model, self._blocks, self._see), torch.no_grad(), suppress(_AllSeen):
                self._batches.run(self._model, self._batches.numbered[number])
        finally:
            for hook in hooks:
                hook.remove()
        if self._fits and self._order != [*range(len(self._blocks))]:
            raise ConfigError("the model calls its blocks in another order than that of their list; name other blocks=")
        return self._fits

    def _entered(self, path: str) -> None:
        if not self._order:
            self.before.add(path)

    def _see(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = BlockCall.of(args, kwargs, self._batches.masks[self._present])
        self._order.append(number)
        first = self.found[0].get(self._present, call) if number else call
        self._fits = first.hidden.shape == call.hidden.shape
        self.found[number][self._present] = call.with_hidden(first.hidden)
        if len(self._order) == len(self._blocks) or not self._fits:
            raise _AllSeen
        hidden = call.hidden * self._factor
        return (hidden,) if self.as_tuple else hidden


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _same(one: Any, other: Any) -> bool:
    ones, others = tree_leaves(one), tree_leaves(other)
    pairs = [(x, y) for x, y in zip(ones, others, strict=False) if isinstance(x, Tensor) and isinstance(y, Tensor)]
    return len(ones) == len(others) and all(torch.equal(x, y) for x, y in pairs)
