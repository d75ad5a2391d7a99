"""Balanced parts against tables of known values; padding against slicing."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.sbp import numpy_model
from tests.sbp.conversion import to_signature

LINE = sbp.placement("cpu", [0, 1, 2, 3])
SQUARE = sbp.placement("cpu", [[0, 1], [2, 3]])


def sizes(shape, placement, signature, dim):
    slices = sbp.balanced_slices(shape, placement, sbp.parse(signature))
    return [part[dim].stop - part[dim].start for part in slices.values()]


@pytest.mark.parametrize(
    ("size", "parts", "expected"),
    [
        (20, 6, (4, 4, 3, 3, 3, 3)),
        (2, 3, (1, 1, 0)),
        (0, 2, (0, 0)),
        (25, 4, (7, 6, 6, 6)),
        (33, 4, (9, 8, 8, 8)),
        (13, 4, (4, 3, 3, 3)),
        (17, 4, (5, 4, 4, 4)),
    ],
)
def test_balanced_sizes(size, parts, expected):
    assert sbp.balanced_sizes(size, parts) == expected


@pytest.mark.parametrize(
    ("size", "line", "square"),
    [
        (4, [1, 1, 1, 1], [1, 1, 1, 1]),
        (5, [2, 1, 1, 1], [2, 1, 1, 1]),
        (6, [2, 2, 1, 1], [2, 1, 2, 1]),
        (7, [2, 2, 2, 1], [2, 2, 2, 1]),
        (8, [2, 2, 2, 2], [2, 2, 2, 2]),
        (9, [3, 2, 2, 2], [3, 2, 2, 2]),
        (10, [3, 3, 2, 2], [3, 2, 3, 2]),
        (11, [3, 3, 3, 2], [3, 3, 3, 2]),
    ],
)
def test_a_dim_split_twice_is_split_again_and_again(size, line, square):
    assert sizes((size,), LINE, "S(0)", 0) == line
    assert sizes((size,), SQUARE, "S(0),S(0)", 0) == square


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("S(0),S(1)", ["0:3,0:3", "0:3,3:5", "3:5,0:3", "3:5,3:5"]),
        ("S(1),S(0)", ["0:3,0:3", "3:5,0:3", "0:3,3:5", "3:5,3:5"]),
        ("S(0),S(0)", ["0:2,0:5", "2:3,0:5", "3:4,0:5", "4:5,0:5"]),
        ("B,S(0)", ["0:3,0:5", "3:5,0:5", "0:3,0:5", "3:5,0:5"]),
        ("S(0),B", ["0:3,0:5", "0:3,0:5", "3:5,0:5", "3:5,0:5"]),
        ("P,P", ["0:5,0:5"] * 4),
    ],
)
def test_parts_of_a_5_by_5_tensor_on_a_square(signature, expected):
    slices = sbp.balanced_slices((5, 5), SQUARE, sbp.parse(signature))
    parts = [",".join(f"{s.start}:{s.stop}" for s in slices[rank]) for rank in range(4)]
    assert parts == expected


@pytest.mark.parametrize("signature", numpy_model.signatures(2), ids="-".join)
@pytest.mark.parametrize("shape", [(17, 13), (10, 7), (1, 0)])
def test_balanced_slices_are_those_of_the_numpy_model(shape, signature):
    placement = sbp.placement("cpu", [[0, 4, 2], [1, 3, 5]])
    slices = sbp.balanced_slices(shape, placement, to_signature(signature))
    for position, rank in np.ndenumerate(np.array(placement.ranks)):
        expected = numpy_model.slices(shape, (2, 3), signature, position)
        assert slices[rank] == expected


def test_uneven_split_is_an_error_that_gives_the_padded_size():
    with pytest.raises(ValueError, match=r"Pad the dim to 28 \(sbp.pad_to does\)"):
        sbp.to_global(np.ones((25, 33)), LINE, sbp.split(0))
    with pytest.raises(ValueError, match="Pad the dim to 4"):
        sbp.zeros((2, 3), placement=LINE, sbp=sbp.split(0))


@pytest.mark.parametrize("signature", ["S(0),S(1)", "S(0),S(0)", "P,S(1)", "B,B"])
def test_padding_comes_off_again_whatever_the_signature(signature):
    value = np.arange(35.0, dtype=np.float32).reshape(5, 7)
    padded = sbp.pad_to(value, SQUARE, sbp.parse(signature), value=-1)
    assert padded.shape == sbp.padded_shape((5, 7), SQUARE, sbp.parse(signature))
    assert sbp.signature_of(padded) == sbp.parse(signature)
    moved = sbp.to_global(padded, sbp=sbp.parse("B,B"))
    for x in (padded, moved):
        np.testing.assert_array_equal(sbp.full_value(sbp.unpad(x, (5, 7))), value)
    outside = sbp.full_value(padded)[~sbp.full_value(sbp.padding_mask(padded, (5, 7)))]
    assert (outside == -1).all()


def test_a_global_tensor_can_be_padded_for_another_placement():
    x = sbp.to_global(np.arange(6.0), sbp.placement("cpu", [0, 1]), sbp.split(0))
    padded = sbp.pad_to(x, LINE, sbp.split(0))
    assert sbp.full_value(padded).tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


def test_masked_mean_is_the_mean_of_the_data():
    value = np.array([1.0, 2.0, 6.0], np.float32)
    padded = sbp.pad_to(value, LINE, sbp.split(0), value=99)
    mask = sbp.padding_mask(padded, (3,))
    assert sbp.signature_of(mask) == sbp.signature_of(padded)
    assert float(jnp.where(mask, padded, 0).sum()) / math.prod((3,)) == 3


def test_unpad_to_a_larger_shape_is_an_error():
    x = sbp.zeros((4, 4), placement=LINE, sbp=sbp.split(0))
    for shape in ((5, 4), (4,)):
        with pytest.raises(ValueError, match=r"shape \(4, 4\) down to"):
            sbp.unpad(x, shape)
