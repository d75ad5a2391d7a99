"""Tests of `launch.text_batches`."""

import pytest

from launch import text_batches


@pytest.mark.parametrize("data_parallel_size", [1, 2, 4])
def test_each_text_is_in_one_batch_that_has_room_for_it(data_parallel_size):
    lengths = [1, 17, 5, 100, 32, 33, 16, 64, 2, 3]
    batches = list(
        text_batches.by_length(
            lengths,
            longest=100,
            global_batch_size=4,
            data_parallel_size=data_parallel_size,
        )
    )

    assert sorted(text for batch in batches for text in batch.texts) == [*range(10)]
    for batch in batches:
        longest = max(lengths[text] for text in batch.texts)
        assert longest <= batch.length <= max(16, min(100, 2 * longest))
        assert len(batch.texts) <= batch.num_rows <= 4
        assert batch.num_rows % data_parallel_size == 0


def test_a_longer_text_gets_the_longest_row():
    (batch,) = text_batches.by_length(
        [70], longest=64, global_batch_size=2, data_parallel_size=1
    )

    assert (batch.length, batch.num_rows) == (64, 1)
