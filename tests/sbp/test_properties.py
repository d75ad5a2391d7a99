"""Random conversions against the NumPy model: placement, signature, shape, dtype.

Every case converts a tensor from one placement and signature to another and compares
local shards, replicas and logical value. Where a split does not divide, the call must
be the error that says so, and the padded tensor must arrive.
"""

import dataclasses

import numpy as np
import pytest

import sbp
from tests.sbp import numpy_model
from tests.sbp.conversion import DTYPES, assert_is, make, to_signature, values

PLACEMENTS = {
    "1": [0],
    "1 elsewhere": [5],
    "2": [0, 1],
    "2 disjoint": [2, 3],
    "2 reversed": [1, 0],
    "3": [0, 1, 3],
    "4": [0, 1, 2, 3],
    "8 shuffled": [3, 1, 7, 5, 0, 2, 6, 4],
    "1x4": [[0, 1, 2, 3]],
    "2x2": [[0, 1], [2, 3]],
    "2x2 shuffled": [[3, 1], [2, 0]],
    "2x2 elsewhere": [[4, 5], [6, 7]],
    "2x3": [[0, 1, 2], [5, 4, 3]],
    "4x2": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "2x2x2": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
}
SHAPES = [
    (),
    (12,),
    (5,),
    (8, 8),
    (12, 24),
    (8, 0),
    (0, 5),
    (7, 5),
    (16, 1),
    (4, 8, 16),
    (6, 8, 3),
    (8, 0, 4),
]


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple
    dtype: str
    source: tuple  # name of the placement, signature
    target: tuple


def random_case(rng):
    shape = SHAPES[rng.integers(len(SHAPES))]
    components = [*(f"S{dim}" for dim in range(len(shape))), "B", "P"]

    def end():
        name = str(rng.choice(list(PLACEMENTS)))
        num_axes = np.ndim(PLACEMENTS[name])
        return name, tuple(str(c) for c in rng.choice(components, num_axes))

    source = end()
    target = end()
    if rng.random() < 0.4:  # often on the same placement
        target = (
            source[0],
            tuple(str(c) for c in rng.choice(components, len(source[1]))),
        )
    return Case(shape, str(rng.choice(list(DTYPES))), source, target)


def check(case, seed):
    ends = [
        (sbp.placement("cpu", PLACEMENTS[name]), signature)
        for name, signature in (case.source, case.target)
    ]
    value = values(case.shape, case.dtype)
    for placement, signature in ends:
        if not numpy_model.divides(value.shape, placement.shape, signature):
            with pytest.raises(ValueError, match=r"sbp.pad_to does"):
                sbp.to_global(value, placement, to_signature(signature))
            value = pad(value, placement, signature)
    if not all(numpy_model.divides(value.shape, p.shape, s) for p, s in ends):
        value = pad(value, *ends[0])  # padding for the second undid the first
    if not all(numpy_model.divides(value.shape, p.shape, s) for p, s in ends):
        return False
    x = make(value, *ends[0], np.random.default_rng(seed))
    assert_is(x, value, *ends[0])
    y = sbp.to_global(x, ends[1][0], to_signature(ends[1][1]))
    assert_is(y, value, *ends[1])
    return True


def pad(value, placement, signature):
    """The value that ``pad_to`` makes; checks it, its mask and its way back."""
    padded = sbp.pad_to(value, placement, to_signature(signature), value=1)
    result = sbp.full_value(padded)
    mask = np.zeros(result.shape, bool)
    mask[tuple(slice(size) for size in value.shape)] = True
    np.testing.assert_array_equal(
        sbp.full_value(sbp.padding_mask(padded, value.shape)), mask
    )
    np.testing.assert_array_equal(sbp.full_value(sbp.unpad(padded, value.shape)), value)
    assert (result[~mask] == 1).all()
    return result


def run(seeds):
    converted = 0
    for seed in seeds:
        case = random_case(np.random.default_rng(seed))
        try:
            converted += check(case, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}")
            raise
    return converted


def test_a_sample_of_random_conversions():
    assert run(range(80)) > 70


@pytest.mark.slow
@pytest.mark.parametrize("block", range(24))
def test_thousands_of_random_conversions(block):
    assert run(range(1000 + 225 * block, 1000 + 225 * (block + 1))) > 200
