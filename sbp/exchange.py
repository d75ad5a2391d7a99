"""Point-to-point exchanges: which device sends which piece to which, in rounds.

Some conversions have no single collective, such as moving a split from one axis to
another. Then every device asks for exactly the pieces it lacks, and the transfers
are packed into rounds in which each device sends at most one piece and receives at
most one: each round is one collective-permute. The number of rounds is the least
possible (a bipartite multigraph of degree n has an edge coloring of n colors).
"""

import collections
import dataclasses
import functools
import itertools
import math

import numpy as np

from sbp.tiling import Axes, Tiling, block_indices, labels


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One end of an exchange: a tiled tensor and where its devices are.

    Attributes:
        tiling: How the tensor lies on this side's mesh.
        axes: Names and sizes of this side's mesh axes.
        positions: For each device of the mesh, in row-major order, its position
            among all devices that take part.
    """

    tiling: Tiling
    axes: Axes
    positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One collective-permute of pieces of one shape.

    Attributes:
        pairs: Sender and receiver of each piece.
        send: Index of the piece each device reads, ``(num_devices, ndim)``.
        receive: Index of the piece each device writes, ``(num_devices, ndim)``.
        receives: Whether each device receives one, ``(num_devices,)``.
    """

    pairs: tuple[tuple[int, int], ...]
    send: np.ndarray
    receive: np.ndarray
    receives: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """All that every device does to turn its source shard into its target shard.

    Attributes:
        source_span: Pieces that a source shard has along each dim.
        target_span: Pieces that a target shard has along each dim.
        read: For each dim, which source piece stands at each target piece,
            ``(num_devices, target_span[dim])``; meaningful where ``keep`` is set.
        keep: Pieces that a device already has, ``(num_devices, *target_span)``.
        rounds: The transfers of the others.
    """

    source_span: tuple[int, ...]
    target_span: tuple[int, ...]
    read: tuple[np.ndarray, ...]
    keep: np.ndarray
    rounds: tuple[Round, ...]


Piece = tuple[int, ...]
Transfer = tuple[int, int, Piece]  # sender, receiver, piece


@functools.lru_cache(maxsize=4096)
def plan_exchange(source: Side, target: Side) -> Exchange:
    """Returns the exchange that turns one tiling into another.

    Along axes that are partial on both sides (of one mesh), addends stay apart.
    Along axes that are partial only in the target, each piece goes to one device of
    the group, to one that has it if there is one; the rest hold zeros.

    Args:
        source: Where the tensor is. Its partial axes must be partial in the target.
        target: Where it should be.
    """
    grid = tuple(
        math.lcm(n, m)
        for n, m in zip(
            source.tiling.counts(dict(source.axes)),
            target.tiling.counts(dict(target.axes)),
            strict=True,
        )
    )
    source_first, source_span = _first_pieces(source, grid)
    target_first, target_span = _first_pieces(target, grid)
    size = max(*source.positions, *target.positions) + 1
    keep = np.zeros((size, *target_span), dtype=bool)
    transfers: list[Transfer] = []
    for receiver, piece, sender in _assign(source, target, grid):
        if sender == receiver:
            local = np.subtract(piece, target_first[receiver])
            keep[(receiver, *local)] = True
        else:
            transfers.append((sender, receiver, piece))
    rounds = tuple(
        _round(transfers_of_one, source_first, target_first, size)
        for transfers_of_one in _color(transfers)
    )
    read = tuple(
        _read_table(source_first, target_first, dim, source_span, target_span)
        for dim in range(len(grid))
    )
    return Exchange(source_span, target_span, read, keep, rounds)


def _first_pieces(
    side: Side, grid: tuple[int, ...]
) -> tuple[dict[int, np.ndarray], tuple[int, ...]]:
    """Returns each position's first piece along each dim, and the pieces of a shard."""
    counts = side.tiling.counts(dict(side.axes))
    span = tuple(g // n for g, n in zip(grid, counts, strict=True))
    first = block_indices(side.tiling, side.axes) * np.array(span, dtype=np.int64)
    return dict(zip(side.positions, first, strict=True)), span


def _pieces(first: np.ndarray, span: tuple[int, ...]) -> list[Piece]:
    ranges = (range(f, f + n) for f, n in zip(first.tolist(), span, strict=True))
    return list(itertools.product(*ranges))


def _assign(
    source: Side, target: Side, grid: tuple[int, ...]
) -> list[tuple[int, Piece, int]]:
    """Returns (receiver, piece, sender) for every piece that a device must hold."""
    shared = source.tiling.partial
    holders = collections.defaultdict(list)
    source_first, span = _first_pieces(source, grid)
    addends = labels(shared, source.axes).tolist()
    for addend, position in zip(addends, source.positions, strict=True):
        for piece in _pieces(source_first[position], span):
            holders[addend, piece].append(position)
    target_first, span = _first_pieces(target, grid)
    wanted = collections.defaultdict(list)
    for addend, members in _groups(target, shared):
        for piece in _pieces(target_first[members[0]], span):
            wanted[addend, piece].append(members)
    order = {position: i for i, position in enumerate(source.positions)}
    sent: collections.Counter[int] = collections.Counter()
    received: collections.Counter[int] = collections.Counter()
    assigned = []
    for key, groups in wanted.items():
        held_by = holders[key]
        index = _choose_member(groups, held_by, order[held_by[0]], received)
        for members in groups:
            receiver = sender = members[index]
            if receiver not in held_by:
                sender = min(held_by, key=lambda position: sent[position])
                sent[sender] += 1
                received[receiver] += 1
            assigned.append((receiver, key[1], sender))
    return assigned


def _choose_member(
    groups: list[list[int]],
    held_by: list[int],
    turn: int,
    received: collections.Counter[int],
) -> int:
    """Returns which member of each group holds a piece: the same in all replicas.

    The one that already has it in most groups; if none has, the one that has received
    least, and among equals they take turns.
    """
    indices = range(len(groups[0]))
    have = [sum(group[i] in held_by for group in groups) for i in indices]
    if any(have):
        return have.index(max(have))
    first = groups[0]
    return min(indices, key=lambda i: (received[first[i]], (i - turn) % len(first)))


def _groups(target: Side, shared: frozenset[str]) -> list[tuple[int, list[int]]]:
    """Returns addend and positions of each group that holds one copy together."""
    names = frozenset(name for name, _ in target.axes)
    groups = collections.defaultdict(list)
    keys = labels(names - (target.tiling.partial - shared), target.axes).tolist()
    addends = labels(shared, target.axes).tolist()
    for key, addend, position in zip(keys, addends, target.positions, strict=True):
        groups[key, addend].append(position)
    return [(addend, members) for (_, addend), members in groups.items()]


def _color(transfers: list[Transfer]) -> list[list[Transfer]]:
    """Packs transfers into rounds, as few as the busiest device has transfers."""
    at: dict[tuple[int, int], dict[int, int]] = collections.defaultdict(dict)
    color_of: dict[int, int] = {}
    ends = [((0, sender), (1, receiver)) for sender, receiver, _ in transfers]

    def paint(edge: int, color: int) -> None:
        color_of[edge] = color
        for end in ends[edge]:
            at[end][color] = edge

    for edge, (sender, receiver) in enumerate(ends):
        first = next(c for c in itertools.count() if c not in at[sender])
        second = next(c for c in itertools.count() if c not in at[receiver])
        # Free the sender's color at the receiver: swap the two colors along the
        # path that starts there. It cannot end at the sender, which lacks `first`.
        path, end, color = [], receiver, first
        while (other := at[end].get(color)) is not None and first != second:
            path.append(other)
            end = ends[other][0] if ends[other][1] == end else ends[other][1]
            color = second if color == first else first
        for other in path:
            for end in ends[other]:
                at[end].pop(color_of[other], None)
        for other in path:
            paint(other, second if color_of[other] == first else first)
        paint(edge, first)
    rounds: dict[int, list[Transfer]] = collections.defaultdict(list)
    for edge, transfer in enumerate(transfers):
        rounds[color_of[edge]].append(transfer)
    return [rounds[color] for color in sorted(rounds)]


def _round(
    transfers: list[Transfer],
    source_first: dict[int, np.ndarray],
    target_first: dict[int, np.ndarray],
    size: int,
) -> Round:
    ndim = len(transfers[0][2])
    send = np.zeros((size, ndim), dtype=np.int32)
    receive = np.zeros((size, ndim), dtype=np.int32)
    receives = np.zeros(size, dtype=bool)
    for sender, receiver, piece in transfers:
        send[sender] = np.subtract(piece, source_first[sender])
        receive[receiver] = np.subtract(piece, target_first[receiver])
        receives[receiver] = True
    pairs = tuple((sender, receiver) for sender, receiver, _ in transfers)
    return Round(pairs, send, receive, receives)


def _read_table(
    source_first: dict[int, np.ndarray],
    target_first: dict[int, np.ndarray],
    dim: int,
    source_span: tuple[int, ...],
    target_span: tuple[int, ...],
) -> np.ndarray:
    size = max(*source_first, *target_first) + 1
    table = np.zeros((size, target_span[dim]), dtype=np.int32)
    for position, first in target_first.items():
        if position in source_first:
            offset = first[dim] - source_first[position][dim]
            wanted = offset + np.arange(target_span[dim])
            table[position] = np.clip(wanted, 0, source_span[dim] - 1)
    return table
