"""Run by three processes of one device each; prints what went right, line by line."""

import jax
import numpy as np
import pytest

import sbp
from sbp import _compat

VALUE = np.arange(12.0, dtype=np.float32).reshape(6, 2)


def main():
    sbp.init()
    rank = jax.process_index()
    line = sbp.placement("cpu", [2, 0, 1])
    assert sbp.Placement.from_mesh(line.mesh) == line
    for check in (one_placement, two_placements, creation, errors, different_calls):
        check(rank, line)
        print(f"passed: {check.__name__}", flush=True)


def one_placement(rank, line):
    x = sbp.to_global(VALUE, line, sbp.split(0))
    start = 2 * line.ranks.index(rank)
    assert (sbp.to_local(x)[rank] == VALUE[start : start + 2]).all()
    for signature in (sbp.partial_sum, sbp.broadcast, sbp.split(0)):
        x = sbp.to_global(x, sbp=signature)
        assert (sbp.full_value(x) == VALUE).all()


def two_placements(rank, line):
    pair, other = (sbp.placement("cpu", ranks) for ranks in ([0, 1], [1, 2]))
    y = sbp.to_global(sbp.to_global(VALUE, pair, sbp.partial_sum), other, sbp.split(1))
    columns = {1: VALUE[:, :1], 2: VALUE[:, 1:]}
    local = sbp.to_local(y)
    assert list(local) == [r for r in (1, 2) if r == rank]
    assert all((shard == columns[r]).all() for r, shard in local.items())
    assert (sbp.full_value(y) == VALUE).all()


def creation(rank, line):
    noise = sbp.randn((6, 2), seed=1, placement=line, sbp=sbp.split(0))
    expected = np.asarray(jax.random.normal(jax.random.key(1), (6, 2)))
    assert (sbp.full_value(noise) == expected).all()
    joined = sbp.from_local({rank: np.full(2, rank)}, line, sbp.split(0))
    assert sbp.full_value(joined).tolist() == [2, 2, 0, 0, 1, 1]


def errors(rank, line):
    def fails(message, function, value):
        with pytest.raises(ValueError, match=message):
            function(value, line, sbp.split(0))

    count = 2 if rank == 1 else 1  # one process is called with too many shards
    fails("in process 1|got 2 shards", sbp.from_local, [VALUE] * count)
    uneven = np.ones(2 + (rank == 0))
    fails(r"sizes \(2, 3, 2\) in the split dim 0", sbp.from_local, [uneven])
    dtypes = np.ones(2, [np.float32, np.int32, np.int32][rank])
    fails("dtype: float32 on rank 0, but int32 on rank 1", sbp.from_local, [dtypes])
    fails("that differ between the 3 processes", sbp.tensor, [rank] * 3)


def different_calls(rank, line):
    _compat.MEETING_SECONDS = 3
    x = sbp.zeros((3, 3), placement=line, sbp=sbp.split(0))
    with pytest.raises(
        TimeoutError, match=r"not all of the processes \(0, 1, 2\) made"
    ):
        sbp.to_global(x, sbp=sbp.broadcast if rank == 0 else sbp.split(1))


if __name__ == "__main__":
    main()
