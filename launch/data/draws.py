"""Random numbers that depend on their place alone: (seed, stream, sample, number).

NumPy's generators are sequential, and may change between versions. Here each number is
a hash of its place (the finalizer of SplitMix64), so a sample is the same whichever
batch, process or resumed run asks for it, and a whole batch is drawn at once.
"""

import math

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def bits(seed: int, stream: int, samples_B: np.ndarray, num: int) -> np.ndarray:
    """Returns random uint64 ``(B, num)``.

    Args:
        seed: Of the run, not negative.
        stream: What the numbers are for; other streams are independent of this one.
        samples_B: Numbers of the samples, not negative.
        num: Numbers for each sample.

    Example:
        >>> both = bits(1, 0, np.array([7, 8]), 3)
        >>> bool((bits(1, 0, np.array([8]), 2) == both[1:, :2]).all())
        True
    """
    key = mix(np.array([seed & _MASK], np.uint64))
    key = mix(key + np.uint64(stream * _GOLDEN & _MASK))
    key_B = mix(key + samples_B.astype(np.uint64) * np.uint64(_GOLDEN))
    steps = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(key_B[:, None] + steps[None])


def uniform(seed: int, stream: int, samples_B: np.ndarray, num: int) -> np.ndarray:
    """Returns random float64 ``(B, num)`` in [0, 1); for the arguments see `bits`."""
    return to_unit(bits(seed, stream, samples_B, num))


def is_held_out(hashes: np.ndarray, *, fraction: float, seed: int) -> np.ndarray:
    """Returns which items are held out, boolean ``(num_items,)``.

    Equal items are on the same side, so that none is trained on and held out.

    Args:
        hashes: uint64 ``(num_items,)``: equal items have equal ones.
        fraction: Of the items, rounded up; 0 holds out none.
        seed: Decides which.

    Example:
        >>> hashes = np.array([7, 8, 9, 7], np.uint64)
        >>> is_held_out(hashes, fraction=0.5, seed=1).tolist()
        [True, True, False, True]
    """
    num_held_out = math.ceil(round(fraction * len(hashes), 6))
    if num_held_out == 0:
        return np.zeros(len(hashes), bool)
    ranks = mix(hashes ^ mix(np.array([seed], np.uint64)))
    return ranks <= np.partition(ranks, num_held_out - 1)[num_held_out - 1]


def shuffle(items: np.ndarray, *, seed: int) -> np.ndarray:
    """Returns distinct numbers in another order, which depends on them and the seed.

    Example:
        >>> shuffle(np.arange(6), seed=1).tolist()
        [5, 0, 4, 2, 3, 1]
    """
    return items[np.argsort(bits(seed, 0, items, 1)[:, 0], kind="stable")]


def to_unit(bits: np.ndarray) -> np.ndarray:
    """Returns random float64 in [0, 1) made of random bits."""
    return (bits >> np.uint64(11)) * 2.0**-53


def mix(values: np.ndarray) -> np.ndarray:
    """Returns uint64 in which every bit depends on every bit of ``values``."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
