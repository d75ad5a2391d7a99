import numpy as np
import pytest

from launch.data import draws, masking

B, L = 4000, 40


def choose(num, max_words, is_start=None, is_text=None):
    if is_start is None:
        is_start = np.ones((B, L), bool)
    if is_text is None:
        is_text = np.ones((B, L), bool)
        is_text[:, [0, 20, L - 1]] = False
    bits = draws.bits(1, 0, np.arange(len(is_text)), is_text.shape[1])
    num = np.full(len(is_text), num)
    return masking.choose(is_start, is_text, num, max_words=max_words, bits_BL=bits)


def test_longer_runs_put_masked_words_side_by_side():
    shares = []
    for max_words in (1, 3):
        masked = choose(6, max_words)
        follows = masked[:, 1:] & masked[:, :-1]
        shares.append(follows.sum() / masked.sum())

    # 5 others of 36; with runs of mean length 18/11 over a third more.
    assert shares[0] == pytest.approx(5 / 36, abs=0.02)
    assert shares[1] > shares[0] + 0.25


def test_wanted_lengths_have_probabilities_in_proportion_to_1_over_n():
    is_text = np.ones((B, L), bool)
    is_text[:, [0, -1]] = False
    words = masking._Words.find(
        is_text, is_text, draws.bits(1, 0, np.arange(B), L), max_words=3
    )
    wanted = words.wanted[: L - 2]
    shares = [(wanted == n).mean() for n in (1, 2, 3)]

    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.01)


def test_a_run_does_not_cross_the_end_of_a_segment():
    masked = choose(36, 3)  # all but one of the 37 tokens

    assert not masked[:, [0, 20, L - 1]].any()
    assert (masked.sum(axis=1) == 36).all()


def test_a_word_that_does_not_fit_is_left_out():
    is_start = np.zeros((B, L), bool)
    is_start[:, [1, 4, 7, 21]] = True  # of 3, 3, 13 and 18 tokens

    masked = choose(8, 1, is_start)

    assert (masked.sum(axis=1) == 6).all()
    assert masked[:, 1:7].all()


def test_less_than_the_shortest_word_chooses_nothing():
    is_start = np.zeros((B, L), bool)
    is_start[:, [1, 21]] = True

    assert not choose(5, 3, is_start).any()


def test_samples_may_have_different_numbers_of_words():
    is_text = np.arange(L)[None] % (L - 1) > np.arange(B)[:, None] % (L - 2)
    masked = choose(2, 3, is_text=is_text)

    np.testing.assert_array_equal(
        masked.sum(axis=1), np.minimum(is_text.sum(axis=1), 2)
    )
    assert not (masked & ~is_text).any()
