"""Plans a change of signature: the cheapest sequence of collectives.

The table of moves, for a mesh axis (or several, taken together):

    source -> target    collective          bytes received per device
    S(i) -> B           all-gather          local * (n - 1)
    P -> S(j)           reduce-scatter      local * (n - 1) / n
    P -> B              all-reduce          2 * local * (n - 1) / n
    S(i) -> S(j)        all-to-all          local * (n - 1) / n
    B -> S(j)           slice               0
    B -> P, S(i) -> P   fill (with zeros)   0
    anything else       collective-permute  what the busiest device lacks

A collective acts on the innermost axes that cut a dim, so that conversions of
several axes are paths through tilings (see ``tiling.py``). The planner takes the
path with the fewest bytes; among equals, the one with the fewest collectives.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from sbp import cost
from sbp.exchange import Exchange, Side, plan_exchange
from sbp.tiling import Axes, Tiling, block_indices

FREE = ("slice", "fill", "relabel")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One move from a tiling to the next.

    Attributes:
        collective: ``'all-gather'``, ``'reduce-scatter'``, ``'all-reduce'``,
            ``'all-to-all'``, ``'collective-permute'``, or one of the moves that
            communicate nothing: ``'slice'``, ``'fill'``, ``'relabel'``.
        axes: Mesh axes it acts along.
        dim: Tensor dim that it gathers, scatters, slices or fills, or None.
        source: Tiling before.
        target: Tiling after.
        num_bytes: Bytes that the busiest device receives.
        num_messages: Collectives it compiles to: 0 for a free move, the number of
            rounds for collective-permutes, else 1.
    """

    collective: str
    axes: tuple[str, ...]
    dim: int | None
    source: Tiling
    target: Tiling
    num_bytes: int = 0
    num_messages: int = 0

    @property
    def is_free(self) -> bool:
        """Whether nothing is communicated."""
        return self.num_messages == 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    """What is the same for all moves of one plan."""

    shape: tuple[int, ...]
    itemsize: int
    axes: Axes

    @property
    def values(self) -> tuple[tuple[int, ...], int, Axes]:
        return self.shape, self.itemsize, self.axes

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def local_bytes(self, tiling: Tiling) -> int:
        local_shape = tiling.local_shape(self.shape, self.sizes)
        return cost.size_bytes(local_shape, self.itemsize)

    def num_devices(self, names: Sequence[str]) -> int:
        sizes = self.sizes
        return functools.reduce(lambda n, name: n * sizes[name], names, 1)


@functools.lru_cache(maxsize=16384)
def route(
    source: Tiling,
    target: Tiling,
    shape: tuple[int, ...],
    itemsize: int,
    axes: Axes,
) -> tuple[Step, ...]:
    """Returns the cheapest steps from one tiling to another on one mesh.

    Args:
        source: Tiling that the tensor has.
        target: Tiling that it should have; it must divide ``shape`` evenly.
        shape: Global shape.
        itemsize: Bytes per element.
        axes: Names and sizes of the mesh axes, in order.

    Returns:
        The steps, none if the tilings are equal.
    """
    if source == target:
        return ()
    setting = _Setting(shape, itemsize, axes)
    if 0 in shape:
        names = tuple(name for name, _ in axes)
        return (
            Step(collective="fill", axes=names, dim=None, source=source, target=target),
        )
    return _Search(source, target, setting).run()


Price = tuple[int, int, int]  # bytes, collectives, steps: compared in this order


class _Search:
    """Dijkstra's algorithm over tilings.

    Exchanges are many and take time to plan, so that they wait in the queue at the
    price they have at least, and are planned when nothing cheaper is left.

    Attributes:
        best: Price of the cheapest path found to each tiling.
        arrived_by: Last step of that path.
        queue: (price, ticket, tiling reached, goal of a waiting exchange or None).
    """

    def __init__(self, source: Tiling, target: Tiling, setting: _Setting) -> None:
        self.source, self.target, self.setting = source, target, setting
        self.best: dict[Tiling, Price] = {source: (0, 0, 0)}
        self.arrived_by: dict[Tiling, Step] = {}
        self.tickets = itertools.count()  # break ties in the order of discovery
        self.queue: list[tuple[Price, int, Tiling, Tiling | None]] = []

    def run(self) -> tuple[Step, ...]:
        """Returns the steps of the cheapest path."""
        goals = list(_exchange_goals(self.target, self.setting))
        self.push((0, 0, 0), self.source, None)
        while True:
            price, _, tiling, goal = heapq.heappop(self.queue)
            if goal is not None:
                self.visit(tiling, exchange_step(tiling, goal, *self.setting.values))
            elif tiling == self.target:
                return self.path()
            elif price == self.best[tiling]:
                for step in _moves(tiling, self.target, self.setting):
                    self.visit(tiling, step)
                for goal in goals:
                    self.await_exchange(tiling, goal)

    def visit(self, tiling: Tiling, step: Step) -> None:
        """Takes a step from ``tiling`` if no cheaper path leads where it leads."""
        price = _add(self.best[tiling], (step.num_bytes, step.num_messages, 1))
        if step.target not in self.best or price < self.best[step.target]:
            self.best[step.target] = price
            self.arrived_by[step.target] = step
            self.push(price, step.target, None)

    def await_exchange(self, tiling: Tiling, goal: Tiling) -> None:
        """Queues an exchange at the price it has at least."""
        if goal == tiling or not tiling.partial <= goal.partial:
            return
        least = _add(self.best[tiling], _least_price(tiling, goal, self.setting))
        if goal not in self.best or least < self.best[goal]:
            self.push(least, tiling, goal)

    def push(self, price: Price, tiling: Tiling, goal: Tiling | None) -> None:
        heapq.heappush(self.queue, (price, next(self.tickets), tiling, goal))

    def path(self) -> tuple[Step, ...]:
        """Returns the steps that led to the target."""
        steps: list[Step] = []
        tiling = self.target
        while tiling != self.source:
            steps.append(self.arrived_by[tiling])
            tiling = steps[-1].source
        return tuple(reversed(steps))


def _add(price: Price, more: Price) -> Price:
    return price[0] + more[0], price[1] + more[1], price[2] + more[2]


def _least_price(source: Tiling, target: Tiling, setting: _Setting) -> Price:
    """Returns what an exchange costs at least."""
    if source.partial != target.partial:
        return 0, 0, 1
    lacking, grid = _lacking_pieces(source, target, setting.axes)
    piece = [size // n for size, n in zip(setting.shape, grid, strict=True)]
    return lacking * cost.size_bytes(piece, setting.itemsize), lacking, 1


@functools.lru_cache(maxsize=65536)
def _lacking_pieces(
    source: Tiling, target: Tiling, axes: Axes
) -> tuple[int, tuple[int, ...]]:
    """Returns how many pieces the poorest device lacks, and pieces of all dims."""
    sizes = dict(axes)
    counts = [np.array(t.counts(sizes), dtype=int) for t in (source, target)]
    grid = np.lcm(*counts)
    first = [
        block_indices(t, axes) * (grid // n)
        for t, n in zip((source, target), counts, strict=True)
    ]
    start = np.maximum(*first)
    stop = np.minimum(first[0] + grid // counts[0], first[1] + grid // counts[1])
    own = np.maximum(stop - start, 0).prod(axis=1, dtype=int)
    lacking = (grid // counts[1]).prod(dtype=int) - own.min()
    return int(lacking), tuple(grid.tolist())


def _moves(tiling: Tiling, target: Tiling, setting: _Setting) -> Iterator[Step]:
    """Yields every step from ``tiling`` but exchanges."""
    dims = _relevant_dims(tiling, target, setting)
    yield from _local_moves(tiling, target, dims, setting)
    yield from _reductions(tiling, target, dims, setting)
    yield from _gathers_and_swaps(tiling, dims, setting)


def _relevant_dims(
    tiling: Tiling, target: Tiling, setting: _Setting
) -> tuple[int, ...]:
    """Returns the dims that a cheapest path may cut: those cut now or in the end.

    A partial sum may need one more to be scattered over: the largest.
    """
    dims = {d for t in (tiling, target) for d, names in enumerate(t.dims) if names}
    if tiling.partial and setting.shape:
        dims.add(max(range(len(setting.shape)), key=lambda d: setting.shape[d]))
    return tuple(sorted(dims))


def _local_moves(
    tiling: Tiling, target: Tiling, dims: tuple[int, ...], setting: _Setting
) -> Iterator[Step]:
    """Slices of broadcast axes, and fills that make an axis partial."""
    for name, _ in setting.axes:
        if name not in tiling.used and name in target.used:
            for dim in dims:
                cut = tiling.with_dim(dim, (*tiling.dims[dim], name))
                if cut.divides(setting.shape, setting.sizes):
                    yield _step("slice", (name,), dim, tiling, cut)
        if name not in target.partial or name in tiling.partial:
            continue
        partial = tiling.partial | {name}
        if name not in tiling.used:
            yield _step("fill", (name,), None, tiling, tiling.with_partial(partial))
        for dim, names in enumerate(tiling.dims):
            if names[-1:] == (name,):
                filled = tiling.with_dim(dim, names[:-1]).with_partial(partial)
                yield _step("fill", (name,), dim, tiling, filled)


def _reductions(
    tiling: Tiling, target: Tiling, dims: tuple[int, ...], setting: _Setting
) -> Iterator[Step]:
    """All-reduces and reduce-scatters of axes that should not stay partial."""
    leaving = [n for n, _ in setting.axes if n in tiling.partial - target.partial]
    local = setting.local_bytes(tiling)
    for names in _subsets(leaving):
        n = setting.num_devices(names)
        summed = tiling.with_partial(tiling.partial - set(names))
        num_bytes = cost.all_reduce_bytes(local, n)
        yield _step(
            _unless_alone("all-reduce", n), names, None, tiling, summed, num_bytes
        )
        num_bytes = cost.reduce_scatter_bytes(local, n)
        for dim in dims:
            cut = summed.with_dim(dim, (*tiling.dims[dim], *names))
            if cut.divides(setting.shape, setting.sizes):
                move = _unless_alone("reduce-scatter", n)
                yield _step(move, names, dim, tiling, cut, num_bytes)


def _gathers_and_swaps(
    tiling: Tiling, dims: tuple[int, ...], setting: _Setting
) -> Iterator[Step]:
    """All-gathers of the innermost axes of a dim, and all-to-alls to another dim."""
    local = setting.local_bytes(tiling)
    for dim, all_names in enumerate(tiling.dims):
        for start in range(len(all_names)):
            names = all_names[start:]
            n = setting.num_devices(names)
            gathered = tiling.with_dim(dim, all_names[:start])
            num_bytes = cost.all_gather_bytes(local, n)
            move = _unless_alone("all-gather", n)
            yield _step(move, names, dim, tiling, gathered, num_bytes)
            num_bytes = cost.all_to_all_bytes(local, n)
            for other in dims:
                swapped = gathered.with_dim(other, (*tiling.dims[other], *names))
                if other != dim and swapped.divides(setting.shape, setting.sizes):
                    move = _unless_alone("all-to-all", n)
                    yield _step(move, names, other, tiling, swapped, num_bytes)


def exchange_step(
    source: Tiling, target: Tiling, shape: tuple[int, ...], itemsize: int, axes: Axes
) -> Step:
    """Returns the step of collective-permutes between two tilings of one mesh."""
    exchange = exchange_on_one_mesh(source, target, axes)
    shard = source.local_shape(shape, dict(axes))
    piece = [n // span for n, span in zip(shard, exchange.source_span, strict=True)]
    num_rounds = len(exchange.rounds)
    return Step(
        collective="collective-permute" if num_rounds else "slice",
        axes=tuple(name for name, _ in axes),
        dim=None,
        source=source,
        target=target,
        num_bytes=cost.permute_bytes(cost.size_bytes(piece, itemsize), num_rounds),
        num_messages=num_rounds,
    )


def exchange_on_one_mesh(source: Tiling, target: Tiling, axes: Axes) -> Exchange:
    """Returns the exchange between two tilings of one mesh."""
    num_devices = functools.reduce(lambda n, axis: n * axis[1], axes, 1)
    everyone = tuple(range(num_devices))
    return plan_exchange(Side(source, axes, everyone), Side(target, axes, everyone))


def _exchange_goals(target: Tiling, setting: _Setting) -> Iterator[Tiling]:
    """Yields the target, and the tilings from which gathers lead to it."""
    yield target
    free = [name for name, _ in setting.axes if name not in target.used]
    for names in _subsets(free):
        for dim in _relevant_dims(target, target, setting):
            cut = target.with_dim(dim, (*target.dims[dim], *names))
            if cut.divides(setting.shape, setting.sizes):
                yield cut


def _step(
    collective: str,
    axes: tuple[str, ...],
    dim: int | None,
    source: Tiling,
    target: Tiling,
    num_bytes: int = 0,
) -> Step:
    return Step(
        collective=collective,
        axes=axes,
        dim=dim,
        source=source,
        target=target,
        num_bytes=num_bytes,
        num_messages=0 if collective in FREE else 1,
    )


def _unless_alone(collective: str, num_devices: int) -> str:
    """Returns the collective; along axes of one device it only changes the type."""
    return collective if num_devices > 1 else "relabel"


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(names) + 1):
        yield from itertools.combinations(names, size)
