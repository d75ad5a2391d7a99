"""Moves between placements: the bytes in the program, and the bound on them."""

import jax
import numpy as np
import pytest

import sbp
from tests.sbp import hlo, numpy_model
from tests.sbp.conversion import assert_is, make, to_signature, values
from tests.sbp.test_properties import PLACEMENTS

SHAPE = (24, 24)
MESHES = {"line": [0, 1, 2, 3], "square": [[0, 1], [2, 3]], "row": [[0, 1, 2, 3]]}


@pytest.mark.parametrize(
    ("here", "source", "there", "target"),
    [
        ("line", ("S0",), "square", ("S0", "S0")),
        ("line", ("S0",), "square", ("S0", "S1")),
        ("line", ("S1",), "square", ("B", "S0")),
        ("line", ("P",), "square", ("S0", "P")),
        ("square", ("S0", "B"), "line", ("S0",)),
        ("square", ("S0", "P"), "line", ("B",)),
        ("square", ("S1", "S0"), "row", ("P", "S0")),
    ],
    ids=str,
)
def test_programs_inside_jit_move_the_planned_bytes(here, source, there, target):
    placements = [sbp.placement("cpu", MESHES[name]) for name in (here, there)]
    value = values(SHAPE, "float32")
    x = make(value, placements[0], source, np.random.default_rng(0))
    move = jax.jit(lambda x: sbp.to_global(x, placements[1], to_signature(target)))
    program = move.lower(x).compile()
    plan = sbp.plan(
        to_signature(source),
        to_signature(target),
        SHAPE,
        "float32",
        placements[0],
        target_placement=placements[1],
    )
    found = hlo.collectives(program.as_text())
    assert sorted(name for name, _ in found) == sorted(plan.collectives)
    assert sum(num_bytes for _, num_bytes in found) == plan.num_bytes
    assert_is(program(x), value, placements[1], target)


def test_no_move_takes_more_than_twice_the_lower_bound():
    rng = np.random.default_rng(0)
    ratios = []
    while len(ratios) < 300:
        ends = [random_end(rng) for _ in range(2)]
        (here, source), (there, target) = ends
        if here == there or not all(
            numpy_model.divides(SHAPE, p.shape, s) for p, s in ends
        ):
            continue
        plan = sbp.plan(
            to_signature(source),
            to_signature(target),
            SHAPE,
            "int8",
            here,
            target_placement=there,
        )
        least = lower_bound(here, source, there, target)
        assert plan.num_bytes <= 2 * least, ends
        ratios.append(plan.num_bytes / least if least else 1)
    assert np.mean(ratios) < 1.1


def random_end(rng):
    placement = sbp.placement("cpu", PLACEMENTS[str(rng.choice(list(PLACEMENTS)))])
    components = rng.choice(["S0", "S1", "B"], len(placement.shape))
    return placement, tuple(map(str, components))


def lower_bound(here, source, there, target):
    """Elements that some device must receive, or send, at least."""
    has = elements_by_rank(here, source)
    wants = elements_by_rank(there, target)
    nothing = np.zeros(SHAPE, bool)
    lacking = [want & ~has.get(rank, nothing) for rank, want in wants.items()]
    received = max(int(mask.sum()) for mask in lacking)
    sent = np.any(lacking, axis=0).sum() / len(has)
    return max(received, sent)


def elements_by_rank(placement, signature):
    masks = {}
    for position, rank in np.ndenumerate(np.array(placement.ranks)):
        mask = np.zeros(SHAPE, bool)
        mask[numpy_model.slices(SHAPE, placement.shape, signature, position)] = True
        masks[int(rank)] = mask
    return masks
