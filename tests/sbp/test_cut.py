"""The minimum cut that decides where partial sums are added up."""

import itertools

import numpy as np
import pytest

import sbp
from sbp.deduction.cut import SumGraph, places_to_add_up


def graph(costs, sources, edges, sinks):
    result = SumGraph(costs=dict(enumerate(costs)))
    for source in sources:
        result.add_source(source)
    for operand, value in edges:
        result.add_edges([operand], value)
    for sink in sinks:
        result.add_sink(sink, sbp.broadcast, costs[sink])
    return result


def separates(values, sources, edges, sinks):
    """Whether every way from a source to a sink passes through one of ``values``."""
    reached = {s for s in sources if s not in values}
    for operand, value in edges:  # in the order of execution
        if operand in reached and value not in values:
            reached.add(value)
    return not reached & set(sinks)


@pytest.mark.parametrize(
    ("costs", "sources", "edges", "sinks", "places"),
    [
        pytest.param([8, 8, 1], [0], [(0, 1), (0, 2)], [1, 2], {0}, id="early"),
        pytest.param([8, 8, 1], [0, 1], [(0, 2), (1, 2)], [2], {2}, id="late"),
        pytest.param([8, 8], [0], [(0, 1)], [1], {1}, id="latest of equals"),
        pytest.param([8, 9], [0], [(0, 1)], [1], {0}, id="before it grows"),
        pytest.param([8, 8], [0], [(0, 1)], [], set(), id="never"),
        pytest.param([8, 8], [0, 1], [], [0, 1], set(), id="where they begin"),
        pytest.param([8, 1], [0], [(0, 1)], [0, 1], {0}, id="before its first use"),
    ],
)
def test_places(costs, sources, edges, sinks, places):
    assert set(places_to_add_up(graph(costs, sources, edges, sinks))) == places


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_of_places_costs_less(seed):
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, 20, 7).tolist()
    sources, sinks = [0, 1], [5, 6]
    edges = [
        (a, b) for a, b in itertools.combinations(range(7), 2) if rng.random() < 0.4
    ]
    edges.sort(key=lambda edge: edge[1])

    places = set(places_to_add_up(graph(costs, sources, edges, sinks)))

    assert separates(places, sources, edges, sinks)
    best = min(
        sum(costs[v] for v in chosen)
        for size in range(8)
        for chosen in itertools.combinations(range(7), size)
        if separates(chosen, sources, edges, sinks)
    )
    assert sum(costs[v] for v in places) == best
