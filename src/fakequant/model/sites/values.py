"""Producers and consumers of the values of a recorded run, and walks along them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fakequant.model.run.recorded import FunctionCall, Recording
from fakequant.model.sites.targets.table import products


class Flow:
    """Producers and consumers of the values of a run."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.calls = recording.calls
        self.consumers = recording.consumers
        self.of_owner = recording.calls_of
        self.products = products()

    def producer(self, value: int) -> FunctionCall | None:
        """The call that made a value."""
        number = self.recording.values[value].producer
        return None if number is None else self.calls[number]

    def source(self, value: int, keeps: frozenset[str]) -> int:
        """The value from which functions that keep scales made a value."""
        while (call := self.producer(value)) is not None and call.function in keeps and call.inputs:
            value = call.inputs[0]
        return value

    def comes_from(self, value: int, wanted: set[int], keeps: frozenset[str]) -> bool:
        """Whether functions that keep scales make a value of wanted ones alone."""
        waiting, seen = [value], {value}
        while waiting:
            value = waiting.pop()
            if value in wanted:
                continue
            call = self.producer(value)
            if call is None or call.function not in keeps or not call.inputs:
                return False
            read = (
                list(call.operands.values()) if len(call.operands) > 1 else list(call.inputs[:1])
            )  # a maximum has two
            waiting += [one for one in read if one not in seen]
            seen.update(read)
        return True

    def reached(self, values: Iterable[int], keeps: frozenset[str]) -> dict[int, None]:
        """Values, and all that functions that keep scales make of them."""
        found, waiting = dict.fromkeys(values), [*values]
        while waiting:
            for consumer in self.consumers.get(waiting.pop(), []):
                made = [one for one in consumer.outputs if consumer.function in keeps and one not in found]
                found.update(dict.fromkeys(made))
                waiting += made
        return found

    def alone(self, value: int) -> bool:
        """Whether one call alone uses a value."""
        return len(self.consumers.get(value, [])) == 1 and value not in self.recording.outputs

    def products_since_common(self, values: Sequence[int]) -> list[int]:
        """For each of several values, the products on the way from the nearest value that all are computed from.

        It is the longest way, and 0 where they have nothing in common. The walk back ends at a value from which all
        others come: whatever lies before it has at least as many products.
        """
        depths = [{value: 0} for value in values]
        waiting = {value for value in values if self.producer(value) is not None}
        while waiting:
            call = max(filter(None, map(self.producer, waiting)), key=lambda call: call.number)
            if len(waiting) == 1 and self._ends_walk(depths, call, *waiting):
                break
            for own in depths:
                reached = [own[output] for output in call.outputs if output in own]
                depth = max(reached, default=0) + (call.function in self.products)
                own.update({parent: max(own.get(parent, 0), depth) for parent in call.inputs if reached})
            waiting.difference_update(call.outputs)
            waiting.update(parent for parent in call.inputs if self.producer(parent) is not None)
        common = set.intersection(*map(set, depths))
        return [min((own[value] for value in common), default=0) for own in depths]

    def _ends_walk(self, depths: Sequence[dict[int, int]], call: FunctionCall, value: int) -> bool:
        """Whether all values come from one, and no parameter or input that they share is read before it."""
        common = set.intersection(*map(set, depths))
        shared = [one for one in common if self.producer(one) is None]
        return value in common and all(c.number > call.number for one in shared for c in self.consumers[one])
