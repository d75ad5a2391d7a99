import numpy as np
import pytest

from launch.data import draws


def test_numbers_depend_on_seed_stream_sample_and_place_alone():
    all_B = draws.bits(3, 1, np.arange(100), 8)

    np.testing.assert_array_equal(draws.bits(3, 1, np.array([42]), 3)[0], all_B[42, :3])
    assert (draws.bits(4, 1, np.arange(100), 8) != all_B).all()
    assert (draws.bits(3, 2, np.arange(100), 8) != all_B).all()
    assert len(np.unique(all_B)) == all_B.size


def test_numbers_stay_what_they_are():
    # Else a run could not be repeated with another version.
    numbers = draws.bits(1234, 0, np.array([0, 10**12]), 1).ravel().tolist()

    assert numbers == [9834565998185327702, 15579888493940527604]


def test_uniform_numbers_fill_the_unit_interval():
    units = draws.uniform(0, 0, np.arange(2000), 50)

    assert 0 <= units.min() < units.max() < 1
    counts = np.histogram(units, bins=20, range=(0, 1))[0]
    assert counts == pytest.approx(np.full(20, 5000), abs=5 * np.sqrt(5000))


def test_neighbors_are_not_correlated():
    units = draws.uniform(0, 0, np.arange(2000), 50) - 0.5
    for a, b in ((units[1:], units[:-1]), (units[:, 1:], units[:, :-1])):
        assert abs((a * b).mean() / (units**2).mean()) < 5 / np.sqrt(a.size)
