"""The bytes that the collectives of a compiled program move."""

import math
import re

from tests import hlo

_SHAPE = re.compile(r"([a-z]+)(\d*)\[([\d,]*)\]")


def collectives(text):
    """(name, bytes that the busiest device receives) of each collective, in order."""
    return [(found.name, _received(found)) for found in hlo.collectives(text)]


def _received(collective):
    size = sum(map(_num_bytes, collective.shapes))  # of its results
    n = len(collective.groups[0])
    match collective.name:
        case "all-gather" | "all-to-all":
            return size * (n - 1) // n
        case "all-reduce":
            return 2 * size * (n - 1) // n
        case "reduce-scatter":
            return size * (n - 1)
        case "collective-permute":
            return size if any(a != b for a, b in collective.groups) else 0
    raise ValueError(f"not a collective that conversions use: {collective}")


def _num_bytes(shape):
    kind, bits, dims = _SHAPE.fullmatch(shape).groups()
    count = math.prod(int(dim) for dim in dims.split(",") if dim)
    return count * (1 if kind == "pred" else int(bits) // 8)
