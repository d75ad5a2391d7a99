"""Reads the collectives, and the bytes they move, from a compiled program's text."""

import re

import numpy as np

_COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<name>all-gather|all-reduce|reduce-scatter|all-to-all"
    r"|collective-permute)(?:-start)?\((?P<rest>.*)"
)
_SHAPE = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")


def collectives(text):
    """(name, bytes that the busiest device receives) of each collective, in order."""
    return [
        (match["name"], _received(match["name"], match["result"], match["rest"]))
        for match in map(_COLLECTIVE.search, text.splitlines())
        if match
    ]


def _received(name, result, rest):
    size = sum(_num_bytes(*shape) for shape in _SHAPE.findall(result))
    if name == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}?", rest)[1]
        ends = re.findall(r"\{(\d+),(\d+)", pairs + "}")
        return size if any(a != b for a, b in ends) else 0
    n = _group_size(rest)
    return {
        "all-gather": size * (n - 1) // n,
        "all-reduce": 2 * size * (n - 1) // n,
        "reduce-scatter": size * (n - 1),
        "all-to-all": size * (n - 1) // n,
    }[name]


def _num_bytes(dtype, dims):
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return int(np.prod([int(d) for d in dims.split(",") if d] or [1])) * bits // 8


def _group_size(rest):
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(iota[1])
    return len(re.search(r"replica_groups=\{\{([\d,]*)\}", rest)[1].split(","))
