"""Changes of images in training: what they do to one image."""

import numpy as np
import pytest
from PIL import Image

from launch.data import augmentation, mixing


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 3.0])
def test_shares_have_the_moments_of_the_beta_distribution(alpha):
    shares = mixing.symmetric_beta(alpha, (np.arange(20000) + 0.5) / 20000)

    assert shares.mean() == pytest.approx(0.5, abs=1e-3)
    assert shares.var() == pytest.approx(1 / (8 * alpha + 4), rel=0.01)


def test_cutmix_share_is_what_is_left():
    rng = np.random.default_rng(0)
    ones, zeros = np.ones((20, 30, 1)), np.zeros((20, 30, 1))
    for share, *units in rng.random((50, 3)):
        mixed, left = mixing.cutmix(ones, zeros, share, np.array(units))

        assert mixed.mean() == pytest.approx(left)
        assert left >= share - 0.1


def test_rectangles_lie_within_the_image_and_their_bounds():
    units = np.random.default_rng(0).random((300, augmentation.NUM_RECTANGLE_UNITS))
    for drawn in units:
        left, top, right, bottom = augmentation.rectangle(
            drawn, (60, 40), areas=(0.2, 0.9), ratios=(3 / 4, 4 / 3)
        )
        assert 0 <= left < right <= 60
        assert 0 <= top < bottom <= 40
        assert 0.18 < (right - left) * (bottom - top) / 2400 < 0.95
        assert 0.7 < (right - left) / (bottom - top) < 1.4


def test_erasing_takes_a_rectangle_at_the_probability():
    rng = np.random.default_rng(0)
    num_erased = 0
    for units in rng.random((400, augmentation.NUM_RECTANGLE_UNITS + 1)):
        image = np.ones((20, 20, 3))
        augmentation.erase(image, units, probability=0.25)
        num_erased += image.min() == 0
        assert image.mean() > 0.6

    assert 70 < num_erased < 130


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", augmentation.CHANGES)
def test_every_change_keeps_size_and_mode(name, mode):
    pixels = np.random.default_rng(0).integers(40, 200, (40, 32, 3), np.uint8)
    image = Image.fromarray(pixels).convert(mode)

    for level in (-1.0, 0.9, 1.0):
        changed = augmentation.CHANGES[name](image, level)

        assert (changed.size, changed.mode) == (image.size, image.mode)
        is_same = changed.tobytes() == image.tobytes()
        gray_has_no_color = name == "color" and mode == "L"
        assert is_same == (name == "identity" or gray_has_no_color)


def test_randaugment_does_as_many_changes_as_asked(monkeypatch):
    done = []
    monkeypatch.setattr(
        augmentation, "CHANGES", {"a": lambda i, level: done.append(level) or i}
    )

    augmentation.rand_augment(
        Image.new("L", (4, 4)), np.array([0.1, 0.2, 0.9, 0.8]), magnitude=9
    )

    assert done == [0.9, -0.9]
