"""Where partial sums are best added up: a minimum cut.

A partial sum travels from the operation that makes it, through additive operations,
to operations that need its value. It must be added up somewhere on each way. Adding
up costs the bytes of the value it is done to: early, one sum serves all that is
computed from it; late, several sums may have become one, or small. The cheapest
places are the minimum cut between the origins and the needs, with values as nodes.
"""

import collections
import dataclasses

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from sbp.signature import Component, broadcast

# Flow is computed in 32-bit integers; all capacities together stay below this.
_MAX_CAPACITY = 2**30


@dataclasses.dataclass(slots=True)
class SumGraph:
    """The partial sums of a region, as they arose when added up as late as possible.

    Attributes:
        costs: Cost of adding up each partial sum.
        sources: Values that became partial sums.
        edges: Pairs of a partial sum and one that an additive operation makes of it.
        sinks: Values that were added up, and to which component.
    """

    costs: dict[int, int] = dataclasses.field(default_factory=dict)
    sources: list[int] = dataclasses.field(default_factory=list)
    edges: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    sinks: dict[int, Component] = dataclasses.field(default_factory=dict)

    def add_source(self, value: int) -> None:
        """Records where a partial sum begins."""
        self.sources.append(value)

    def add_edges(self, operands: list[int], value: int) -> None:
        """Records what a partial sum was computed from."""
        self.edges += [(operand, value) for operand in operands]

    def add_sink(self, value: int, target: Component, cost: int) -> None:
        """Records that a partial sum was added up, and for how many bytes."""
        self.sinks[value] = target
        self.costs[value] = cost


def places_to_add_up(graph: SumGraph) -> dict[int, Component]:
    """Returns the values to add up as soon as they are made, and to what.

    Empty if nothing can be gained over adding up where values are needed. Between
    cuts of equal cost the latest is taken.

    Example:
        A product of 100 bytes (0), needed twice: after it is scaled (1, 100 bytes)
        and after it is averaged (2, 10 bytes). Added up at once, it costs 100.

        >>> graph = SumGraph(costs={0: 100, 1: 100, 2: 10})
        >>> graph.add_source(0)
        >>> graph.add_edges([0], 1)
        >>> graph.add_edges([0], 2)
        >>> graph.add_sink(1, broadcast, 100)
        >>> graph.add_sink(2, broadcast, 10)
        >>> places_to_add_up(graph)
        {0: sbp.broadcast}
    """
    if graph.sinks.keys() <= set(graph.sources):
        return {}
    values = sorted(graph.costs)
    index = {value: i for i, value in enumerate(values)}
    source, sink = 2 * len(values), 2 * len(values) + 1
    scale = min(1.0, _MAX_CAPACITY / max(1, sum(graph.costs.values())))
    # Each value is an edge from its "made" node 2i to its "read" node 2i + 1.
    arcs = {
        (2 * i, 2 * i + 1): max(1, round(graph.costs[value] * scale))
        for value, i in index.items()
    }
    for value in graph.sources:
        arcs[source, 2 * index[value]] = _MAX_CAPACITY
    for operand, value in graph.edges:
        arcs[2 * index[operand] + 1, 2 * index[value]] = _MAX_CAPACITY
    for value in graph.sinks:
        arcs[2 * index[value] + 1, sink] = _MAX_CAPACITY
    reaching = _nodes_that_reach(sink, arcs, source)
    return {
        value: graph.sinks.get(value, broadcast)
        for value, i in index.items()
        if 2 * i + 1 in reaching and 2 * i not in reaching
    }


def _nodes_that_reach(
    sink: int, arcs: dict[tuple[int, int], int], source: int
) -> set[int]:
    """Returns the sink's side of the minimum cut that is closest to the sink."""
    tails, heads = np.array(list(arcs), dtype=np.int32).T
    capacities = np.array(list(arcs.values()), dtype=np.int32)
    num_nodes = max(source, sink) + 1
    shape = (num_nodes, num_nodes)
    capacity = csr_array((capacities, (tails, heads)), shape=shape)
    flow = maximum_flow(capacity, source, sink).flow
    residual = (capacity - flow).tocoo()
    before = collections.defaultdict(list)
    for tail, head, left in zip(residual.row, residual.col, residual.data, strict=True):
        if left > 0:
            before[int(head)].append(int(tail))
    reaching, stack = {sink}, [sink]
    while stack:
        for node in before[stack.pop()]:
            if node not in reaching:
                reaching.add(node)
                stack.append(node)
    return reaching
