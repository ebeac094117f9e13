"""Operations and constants that no output depends on."""

from __future__ import annotations

from fakequant.ir.graph import Graph
from fakequant.ir.table import repeatable


class RemoveDeadCode:
    """Removes what no output depends on; inputs stay, and so does what draws random numbers."""

    name = "dead code"
    exact = True

    def run(self, graph: Graph) -> Graph:
        """A graph without them."""
        wanted = set(graph.outputs)
        kept = []
        for op in reversed(graph.ops):
            if wanted.intersection(op.output_ids) or not repeatable(op):
                kept.append(op)
                wanted.update(op.input_ids)
        constants = {id: constant for id, constant in graph.constants.items() if id in wanted}
        return graph.replaced(kept[::-1], constants)
