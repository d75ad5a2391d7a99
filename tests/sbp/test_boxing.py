"""Every change of signature: values, collectives, bytes, and the bound on them."""

import itertools

import jax
import numpy as np
import pytest

import sbp
from tests.sbp import hlo, numpy_model
from tests.sbp.conversion import assert_is, make, to_signature, values

SHAPE = (8, 8)
MESHES = {
    "2x2": [[0, 1], [2, 3]],
    "2x4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "4x2": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "2x2x2": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
}


def check_pair(placement, source, target, value):
    """Compiles one conversion, runs it, and compares it with its plan."""
    rng = np.random.default_rng(0)
    x = make(value, placement, source, rng)
    convert = jax.jit(lambda x: sbp.to_global(x, sbp=to_signature(target)))
    program = convert.lower(x).compile()
    assert_is(program(x), value, placement, target)
    plan = sbp.plan(
        to_signature(source), to_signature(target), value.shape, value.dtype, placement
    )
    found = hlo.collectives(program.as_text())
    assert sorted(name for name, _ in found) == sorted(plan.collectives)
    assert sum(num_bytes for _, num_bytes in found) == plan.num_bytes


@pytest.mark.parametrize("source", numpy_model.signatures(2), ids="-".join)
def test_all_pairs_on_2x2_move_the_planned_bytes_and_keep_the_value(source):
    placement = sbp.placement("cpu", MESHES["2x2"])
    for target in numpy_model.signatures(2):
        check_pair(placement, source, target, values(SHAPE, "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("source", numpy_model.signatures(2), ids="-".join)
@pytest.mark.parametrize("mesh", ["2x4", "4x2"])
def test_all_pairs_on_larger_meshes(mesh, source):
    placement = sbp.placement("cpu", MESHES[mesh])
    for target in numpy_model.signatures(2):
        check_pair(placement, source, target, values((16, 16), "int32"))


@pytest.mark.slow
@pytest.mark.parametrize("source", numpy_model.signatures(3), ids="-".join)
def test_pairs_of_three_axes(source):
    placement = sbp.placement("cpu", MESHES["2x2x2"])
    rng = np.random.default_rng(abs(hash(source)) % 2**32)
    targets = numpy_model.signatures(3)
    for index in rng.choice(len(targets), size=12, replace=False):
        check_pair(placement, source, targets[index], values(SHAPE, "float32"))


@pytest.mark.parametrize("mesh", ["2x2", "2x4", "4x2"])
def test_no_pair_moves_more_than_twice_the_lower_bound(mesh):
    placement = sbp.placement("cpu", MESHES[mesh])
    worst = bound_ratio(placement, numpy_model.signatures(2))
    assert worst[0] <= 2, worst


@pytest.mark.slow
def test_no_pair_of_three_axes_moves_more_than_twice_the_lower_bound():
    placement = sbp.placement("cpu", MESHES["2x2x2"])
    worst = bound_ratio(placement, numpy_model.signatures(3))
    assert worst[0] <= 2, worst


def bound_ratio(placement, signatures):
    """The largest ratio of planned to least bytes, and the pair that has it."""
    worst = (0, None)
    for source, target in itertools.product(signatures, repeat=2):
        ends = to_signature(source), to_signature(target)
        plan = sbp.plan(*ends, SHAPE, "int8", placement)
        least = numpy_model.lower_bound(SHAPE, placement.shape, source, target)
        if least == 0:
            assert plan.num_bytes == 0, (source, target)
        else:
            worst = max(worst, (plan.num_bytes / least, (source, target)))
    return worst
