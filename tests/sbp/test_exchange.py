import collections
import itertools

import numpy as np
import pytest

from sbp import exchange


def random_transfers(rng, num_devices, count):
    pairs = itertools.permutations(range(num_devices), 2)
    pool = list(pairs) * 3
    return [(*pool[i], (0,)) for i in rng.choice(len(pool), count, replace=False)]


@pytest.mark.parametrize("seed", range(20))
def test_rounds_are_as_few_as_the_busiest_device_has_transfers(seed):
    rng = np.random.default_rng(seed)
    transfers = random_transfers(rng, 6, int(rng.integers(1, 60)))
    rounds = exchange._color(transfers)
    assert sorted(itertools.chain(*rounds)) == sorted(transfers)
    for one in rounds:
        senders, receivers, _ = zip(*one, strict=True)
        assert len(set(senders)) == len(one) == len(set(receivers))
    sent = collections.Counter(sender for sender, _, _ in transfers)
    received = collections.Counter(receiver for _, receiver, _ in transfers)
    assert len(rounds) == max(*sent.values(), *received.values())
