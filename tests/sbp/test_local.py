import numpy as np
import pytest

import sbp


@pytest.fixture
def pair():
    return sbp.placement("cpu", [0, 1])


def test_split_shards_are_joined(pair):
    x = sbp.from_local([np.array([0, 1])] * 2, pair, sbp.split(0))
    assert x.shape == (4,)
    assert x.tolist() == [0, 1, 0, 1]
    assert sbp.from_local([np.ones((2, 5))] * 2, pair, sbp.split(0)).shape == (4, 5)


def test_addends_stay_apart(pair):
    x = sbp.from_local(
        {1: np.array([5, 6]), 0: np.array([1, 2])}, pair, sbp.partial_sum
    )
    assert sbp.to_local(x)[1].tolist() == [5, 6]
    assert sbp.full_value(x).tolist() == [6, 8]


@pytest.mark.parametrize(
    "signature", ["S(0),S(1)", "B,S(0)", "S(1),P", "P,B", "S(1),S(1)"]
)
def test_to_local_and_from_local_are_inverse(signature):
    placement = sbp.placement("cpu", [[0, 3], [1, 2]])
    value = np.arange(64).reshape(8, 8)
    x = sbp.to_global(value, placement, sbp.parse(signature))
    again = sbp.from_local(sbp.to_local(x), placement, sbp.parse(signature))
    assert again.sharding == x.sharding
    np.testing.assert_array_equal(sbp.full_value(again), value)


def test_from_local_does_not_change_its_input(pair):
    shards = [np.array([1, 2]), np.array([3, 4])]
    x = sbp.from_local(shards, pair, sbp.split(0))
    shards[0][:] = 9
    assert x.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("shapes", "signature", "message"),
    [
        (
            [(2, 4), (4, 4)],
            "S(0)",
            r"sizes \(2, 4\) in the split dim 0: neither equal nor",
        ),
        ([(3, 4), (2, 4)], "S(0)", r"the balanced parts of 5. .* pad each shard to 3"),
        ([(2, 4), (4, 4)], "S(1)", r"dim 0 .* got 2 on rank 0 and 4 on rank 1"),
        ([(2, 4), (4, 4)], "B", r"B does not split it"),
        ([(2, 4), (2,)], "S(0)", r"different ndim: 2 on rank 0, but 1 on rank 1"),
        ([(4,), (4,)], "S(1)", r"sbp.split\(1\) on mesh axis 'x' names a dim"),
    ],
)
def test_shards_that_do_not_fit_are_errors(pair, shapes, signature, message):
    shards = [np.ones(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        sbp.from_local(shards, pair, sbp.parse(signature))


def test_shards_of_different_dtypes_are_an_error(pair):
    shards = [np.ones(2, np.float32), np.ones(2, np.int32)]
    with pytest.raises(
        ValueError, match="dtype: float32 on rank 0, but int32 on rank 1"
    ):
        sbp.from_local(shards, pair, sbp.split(0))


def test_different_replicas_are_an_error_unless_the_caller_vouches(pair):
    shards = [np.array([1, 2]), np.array([1, 3])]
    with pytest.raises(ValueError, match="different values on the ranks 0 and 1"):
        sbp.from_local(shards, pair, sbp.broadcast)
    x = sbp.from_local(shards, pair, sbp.broadcast, check_replicas=False)
    assert x.shape == (2,)
    nan = np.array([np.nan])
    sbp.from_local([nan, nan], pair, sbp.broadcast)


@pytest.mark.parametrize(
    ("shards", "error", "message"),
    [
        ([np.ones(2)], ValueError, r"got 1 shards, .* holds the 2 ranks \[0, 1\]"),
        ({0: np.ones(2)}, ValueError, r"ranks \[0\], but .* ranks \[0, 1\]"),
        ({0: np.ones(2), 5: np.ones(2)}, ValueError, r"ranks \[0, 5\], but"),
        (np.ones((2, 2)), TypeError, "but got ndarray"),
    ],
)
def test_wrong_shards_are_errors_that_name_the_ranks(pair, shards, error, message):
    with pytest.raises(error, match=message):
        sbp.from_local(shards, pair, sbp.split(0))


def test_full_value_of_what_is_not_global():
    assert sbp.full_value([1, 2]).tolist() == [1, 2]
