"""Reads the collectives from the text of a compiled program, and the loops they are in.

    found = collectives(compiled.as_text())
    in_loops = [c for c in found if c.loops]
    over_data = [c for c in found if "data" in c.axes(mesh.shape)]

A computation that is called from two places is walked through twice, so that what is
found is what runs.
"""

import dataclasses
import itertools
import math
import re

import numpy as np

NAMES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_HEADER = re.compile(r"^(ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(NAMES)})(-start)?\(")
_SHAPE = re.compile(r"\b(?:pred|token|[a-z]+\d+\w*)\[[\d,]*\]")
_CALLED = re.compile(
    r"\b(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop; ``trips`` is None where the compiler does not know their number."""

    body: str
    trips: int | None


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective.

    ``groups`` are device positions, those of ``mesh.devices.flat``: the members of each
    group, or the (source, target) pairs of a permutation. ``loops`` are those around
    it, from outside in; ``conditionals`` is the number of branches it is in.
    """

    name: str
    shapes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    loops: tuple[Loop, ...]
    conditionals: int
    op_name: str

    @property
    def num_bytes(self):
        """Of the result, on one device."""
        return sum(map(_num_bytes, self.shapes))

    def axes(self, mesh_shape):
        """The mesh axes over which it communicates; ``mesh_shape`` as of a mesh."""
        names, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
        groups = self.groups or (tuple(range(math.prod(sizes))),)
        moved = np.zeros(len(names), bool)
        for group in groups:
            places = np.array(np.unravel_index(group, sizes))
            moved |= places.min(1) != places.max(1)
        return tuple(itertools.compress(names, moved))


def collectives(text):
    """The collectives of a program, in the order of its text, branches included."""
    computations, entry = _split(text)
    lines = _lines(computations, entry, loops=(), conditionals=0)
    return list(_collectives(lines))


def copies(text):
    """(bytes, loops) of each copy of an array that the program makes."""
    computations, entry = _split(text)
    lines = _lines(computations, entry, loops=(), conditionals=0)
    return [
        (sum(map(_num_bytes, _SHAPE.findall(match[1]))), loops)
        for line, loops, _ in lines
        if (match := re.search(r" = (.*?) copy\(", line))
    ]


def computation(text, name):
    """The lines of a computation, in the order in which they run if scheduled."""
    return _split(text)[0][name]


def parse_groups(line):
    """The groups of an instruction, expanded, in whatever form they are written."""
    if match := re.search(r"source_target_pairs=(\{.*?\}\}|\{\})", line):
        return _listed(match[1])
    if match := re.search(r"replica_groups=(\{\{.*?\}\}|\{\})", line):
        return _listed(match[1])
    if match := re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
    ):
        shape, sizes = _numbers(match[1]), _numbers(match[2])
        order = _numbers(match[3]) if match[3] else range(len(sizes))
        places = np.arange(math.prod(sizes)).reshape(sizes).transpose(*order)
        return tuple(map(tuple, places.reshape(shape).tolist()))
    if match := re.search(r"replica_groups=mesh\[(.*?)\](.*?) \{(.*?)\}", line):
        return _mesh_groups(*match.groups())
    raise ValueError(f"No groups of a known form in: {line}")


def _split(text):
    """The lines of each computation by its name, and the name of the first to run."""
    computations, entry, lines = {}, None, []
    for line in text.splitlines():
        if match := _HEADER.match(line.strip() if line[:1] != " " else line):
            lines = computations[match["name"]] = []
            entry = match["name"] if match[1] else entry
        else:
            lines.append(line)
    return computations, entry


def _collectives(lines):
    for line, loops, conditionals in lines:
        if match := _COLLECTIVE.search(line):
            op_name = re.search(r'op_name="(.*?)"', line)
            yield Collective(
                name=match[2],
                shapes=_result_shapes(*match.groups()),
                groups=parse_groups(line),
                loops=loops,
                conditionals=conditionals,
                op_name=op_name[1] if op_name else "",
            )


def _lines(computations, name, *, loops, conditionals):
    """Each line, as often as it is reached, with its loops and conditionals."""
    for line in computations[name]:
        yield line, loops, conditionals
        if _COLLECTIVE.search(line):  # what it calls is a sum of two numbers
            continue
        called = [found for kind, found in _CALLED.findall(line) if kind != "to_apply"]
        is_branch = "_computation=" in line
        if " call(" in line:
            called += [found for _, found in _CALLED.findall(line)]
        for branches in _BRANCHES.findall(line):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
            is_branch = True
        is_loop = " while(" in line
        for found in called:
            trips = _TRIPS.search(line)
            loop = Loop(found, int(trips[1]) if trips else None)
            yield from _lines(
                computations,
                found,
                loops=(*loops, loop) if is_loop else loops,
                conditionals=conditionals + is_branch,
            )


def _result_shapes(result, name, start):
    shapes = tuple(_SHAPE.findall(result))
    if start and name in ("all-gather", "reduce-scatter"):  # (operands, results)
        return shapes[len(shapes) // 2 :]
    if start and name == "collective-permute":  # (operand, result, ...)
        return shapes[1:2]
    return shapes


def _num_bytes(shape):
    dtype, dims = re.fullmatch(r"(\w+)\[(.*)\]", shape).groups()
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.prod(_numbers(dims)) * bits // 8


def _listed(text):
    return tuple(
        _numbers(group) for group in re.findall(r"\{([\d,]+)\}", text.replace(" ", ""))
    )


def _mesh_groups(axes, assignment, chosen):
    """Of ``mesh['a'=2,'b'=4] {'a'}``; a part of an axis is written ``'b':(2)2``."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    dims, chosen_dims = [], []
    parts = {
        name: (int(before), int(size))
        for name, before, size in re.findall(r"'([^']+)':\((\d+)\)(\d+)", chosen)
    }
    whole = set(re.findall(r"'([^']+)'", chosen)) - set(parts)
    for name, size in sizes.items():
        before, part = parts.get(name, (1, size))
        chosen_dims += [len(dims) + 1] if name in parts or name in whole else []
        dims += [before, part, size // (before * part)]
    places = np.arange(math.prod(dims))
    if ids := re.search(r"device_ids=\(([\d,]+)\)", assignment):
        places = np.array(_numbers(ids[1]))
    places = np.moveaxis(places.reshape(dims), chosen_dims, range(-len(chosen_dims), 0))
    group_size = math.prod(dims[dim] for dim in chosen_dims)
    return tuple(map(tuple, places.reshape(-1, group_size).tolist()))


def _numbers(text):
    return tuple(int(number) for number in text.split(",") if number)
