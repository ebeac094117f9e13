"""The blocks of a model that run one after the other, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.data.batches import BatchError, KeptBatches
from fakequant.errors import ConfigError, shown
from fakequant.nn.paths import join
from fakequant.text import listed

BlockFunction = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the number of a block and the arguments of a call; returns the block's output."""


Place = int | str
"""The place of the hidden states among the arguments of a block: a number, or a name."""


class BlockCall:
    """A call of a block: the hidden states that it gets, and its other arguments.

    Args:
        hidden: the hidden states.
        place: where they are among the arguments.
        args: all positional arguments.
        kwargs: all named arguments.
        mask: the unmasked tokens, bool [batch, tokens]; None if all count.

    Attributes:
        output: what the block gave when it ran last.
    """

    output: Any = None

    def __init__(
        self, hidden: Tensor, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
    ) -> None:
        self.hidden, self.place, self.mask = hidden, place, mask
        self.args = tuple(None if at == place else value for at, value in enumerate(args))
        self.kwargs = {name: None if name == place else value for name, value in kwargs.items()}

    def with_hidden(self, hidden: Tensor) -> BlockCall:
        """The same call with other hidden states."""
        return BlockCall(hidden, self.place, self.args, self.kwargs, self.mask)

    def run(self, block: nn.Module) -> Any:
        """What a block gives; it may write into its hidden states."""
        hidden = self.hidden.clone()
        args = [hidden if at == self.place else value for at, value in enumerate(self.args)]
        return block(*args, **{name: hidden if name == self.place else value for name, value in self.kwargs.items()})


def _places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Place, Any]:
    return {**dict(enumerate(args)), **kwargs}


def blocks_of(model: nn.Module, name: str | None) -> dict[str, nn.Module]:
    """The items of the list of modules that holds most parameters, or of a named one, by their paths.

    Raises:
        ConfigError: there is none, or a module is in it twice.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    >>> list(blocks_of(model, None))
    ['layers.0', 'layers.1']
    """
    lists = {path: one for path, one in model.named_modules() if isinstance(one, (nn.ModuleList, nn.Sequential))}
    if name is not None and not (isinstance(name, str) and name in lists):
        known = listed([repr(path) for path in lists]) or "none"
        raise ConfigError(f"the model has no list of modules {shown(name)} for blocks=; its lists are {known}")
    if not lists:
        raise ConfigError("the model has no list of modules whose items could be its blocks")
    sizes = {path: sum(parameter.numel() for parameter in one.parameters()) for path, one in lists.items()}
    chosen = max(lists, key=sizes.__getitem__) if name is None else name
    found = {join(chosen, key): block for key, block in lists[chosen].named_children()}
    if len(set(found.values())) < len(lists[chosen]):
        raise ConfigError(f"{chosen} holds a block twice, which is called with the weights of another one")
    return found


class _Substitute(nn.Module):
    """Stands in the place of a block; other attributes are those of the block."""

    def __init__(self, number: int, block: nn.Module, see: BlockFunction) -> None:
        super().__init__()
        self.__dict__.update(_number=number, _block=block, _function=see)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._number, args, kwargs)


@contextmanager
def in_place_of(model: nn.Module, blocks: Iterable[str], see: BlockFunction) -> Iterator[None]:
    """A context in which a function is called in the place of each block."""
    places = [(model.get_submodule(path.rpartition(".")[0])._modules, path.rpartition(".")[2]) for path in blocks]
    own = [modules[key] for modules, key in places]
    try:
        for number, ((modules, key), block) in enumerate(zip(places, own, strict=True)):
            assert block is not None
            modules[key] = _Substitute(number, block, see)
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
        place: of the hidden states among the arguments of a block.
    """

    of_blocks: list[dict[int, BlockCall]]
    before: set[str]
    as_tuple: bool
    place: Place

    def substitute(self, hidden: Callable[[], Tensor]) -> BlockFunction:
        """The function that replaces each block; in place of the last block it returns `hidden()`."""

        def see(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            last = number == len(self.of_blocks) - 1
            own = hidden() if last else _places(args, kwargs)[self.place]
            return (own,) if self.as_tuple else own

        return see


_CHANGED = (
    "{1} does not get what {0} gives: the model changes the hidden states between its blocks; improve it in memory, or "
    "name other blocks="
)


def calls_of(model: nn.Module, blocks: Sequence[str], batches: KeptBatches, *, to_the_end: bool = True) -> Calls:
    """The calls of each block for all batches; blocks do not run, and each returns hidden states of its own.

    Args:
        model: whose modules outside of the blocks have weights.
        blocks: their paths, in the order of their calls.
        batches: with their masks.
        to_the_end: whether the first batch runs the modules after the blocks, too, which may call blocks again.

    Raises:
        ConfigError: a model that calls its blocks in another order or several times, changes the hidden states between
            two blocks, or gives a block something else that depends on an earlier one.
    """
    first, recorder = next(iter(batches.numbered)), _Recorder(model, blocks, batches)
    for recorder.as_tuple in (False, True):
        # A second run, with the place of the hidden states that the second block showed.
        if recorder.run(first, to_the_end=to_the_end) or (
            recorder.learned and recorder.run(first, to_the_end=to_the_end)
        ):
            break
    else:
        if recorder.failed is not None:
            raise ConfigError(
                f"the model does not run with its blocks replaced, {recorder.failed}; improve it in memory"
            ) from recorder.failed
        raise ConfigError(_CHANGED.format(*blocks))
    found = [own[first] for own in recorder.found]
    recorder.factor = 0.5
    recorder.run(first)
    for path, one, own in zip(blocks, found, recorder.found, strict=True):
        if not _same((one.args, one.kwargs), (own[first].args, own[first].kwargs)):
            raise ConfigError(
                f"{path} gets more of an earlier block than its hidden states; improve the model in memory"
            )
        for value in (*one.args, *one.kwargs.values()):
            _check_plain(path, value)
    recorder.factor = 1.0
    for number in batches.numbered:
        if not recorder.run(number):
            raise ConfigError(_CHANGED.format(*blocks))
    return Calls(recorder.found, recorder.before, recorder.as_tuple, recorder.place)


class _AllSeen(BaseException):
    """Ends the forward pass of a model before its last block."""


class _Recorder:
    """Records the calls of blocks, which do not run.

    Attributes:
        found: by block and the number of the batch.
        as_tuple: whether a block returns a tuple.
        place: of the hidden states among the arguments.
        learned: whether the last run found another place.
        factor: of the hidden states that a block returns.
        failed: the error that ended the last run behind a block.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], batches: KeptBatches) -> None:
        self._model, self._blocks, self._batches = model, blocks, batches
        self.as_tuple, self.place, self.learned, self.factor = False, -1, False, 1.0
        self.before, self.failed = set[str](), None
        self.found: list[dict[int, BlockCall]] = [{} for _ in blocks]
        self._order, self._present, self._fits, self._to_the_end = list[int](), 0, True, False
        self._given: Tensor | None = None

    place: Place
    failed: BatchError | None

    def run(self, number: int, *, to_the_end: bool = False) -> bool:
        """Record the calls for a batch; whether each block gets what the one before it returns.

        Raises:
            ConfigError: blocks are called in another order than that of their list.
            BatchError: the model fails before its blocks.
        """
        self._order.clear()
        self._present, self._fits, self._to_the_end, self._given = number, True, to_the_end, None
        self.learned, self.failed, hooks = False, None, []
        try:
            for path, module in self._model.named_modules():

                def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
                    self.before |= set() if self._order else {path}

                hooks.append(module.register_forward_pre_hook(enter))
            with in_place_of(self._model, self._blocks, self._called), torch.no_grad(), suppress(_AllSeen):
                self._batches.run(self._model, self._batches.numbered[number])
        except BatchError as error:
            if not self._order:  # before the blocks: of the batch
                raise
            self.failed = error
            return False
        finally:
            for hook in hooks:
                hook.remove()
        if self._fits and self._order != [*range(len(self._blocks))]:
            raise ConfigError(
                f"the model calls its blocks in the order {self._order}, not each once in that of their list; name "
                "other blocks=, or improve it in memory"
            )
        return self._fits

    def _called(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = _places(args, kwargs)
        if self._given is not None:
            here = next((place for place, value in places.items() if value is self._given), None)
            self._fits = here is not None and here == self.place
            if here is not None and here != self.place:
                self.place, self.learned = here, True
        elif not _is_float(places.get(self.place)):
            self.place = next((place for place, value in places.items() if _is_float(value)), self.place)
        self._order.append(number)
        hidden = places.get(self.place)
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            raise ConfigError(f"{self._blocks[number]} gets no hidden states as an argument; name other blocks=")
        calls = self.found[0]
        first = calls[self._present].hidden if number and self._present in calls else hidden
        self.found[number][self._present] = BlockCall(
            first, self.place, args, kwargs, self._batches.masks[self._present]
        )
        if not self._fits or (len(self._order) >= len(self._blocks) and not self._to_the_end):
            raise _AllSeen
        self._given = hidden * self.factor
        return (self._given,) if self.as_tuple else self._given


_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None))


def _check_plain(path: str, value: Any) -> None:
    """Raise where an argument may keep values of a call, as a cache does."""
    if isinstance(value, tuple):
        for item in value:
            _check_plain(path, item)
    elif not isinstance(value, _PLAIN):
        raise ConfigError(
            f"{path} gets a {type(value).__name__}, which may keep values of a call; improve the model in memory"
        )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _same(one: Any, other: Any) -> bool:
    ones, others = tree_leaves(one), tree_leaves(other)
    if len(ones) != len(others):
        return False
    pairs = zip(ones, others, strict=True)
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or x == y for x, y in pairs
    )
