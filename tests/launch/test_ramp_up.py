"""Batch sizes that grow: their arithmetic, the samples they take, whole runs."""

import itertools

import numpy as np
import pytest

from launch import input_pipeline, ramp_up, resolve
from launch.input_pipeline import Splits
from launch.resolve import DeviceCount
from tests.launch import tiny_runs


def megatron_sizes(first, increment, num_samples, last, num_steps):
    """The sizes by Megatron's rule: as many increments as parts of the samples."""
    per_increment = num_samples / ((last - first) // increment)
    seen, sizes = 0, []
    for _ in range(num_steps):
        grown = first + int(seen / per_increment) * increment
        sizes.append(min(grown, last) if seen < num_samples else last)
        seen += sizes[-1]
    return sizes


@pytest.mark.parametrize(
    "case",
    [(2, 2, 10, 6), (4, 4, 100, 32), (1, 1, 3, 9), (8, 8, 1000, 64), (6, 3, 7, 12)],
    ids=str,
)
def test_sizes_grow_as_megatron_says(case):
    *rampup, last = case
    sizes = ramp_up.build(tuple(rampup), last)

    found = [sizes.size_at(step) for step in range(100)]

    assert found == megatron_sizes(*case, 100)
    before = [sizes.samples_before(step) for step in range(100)]
    assert before == [0, *itertools.accumulate(found)][:100]


def test_without_ramp_up_all_batches_are_of_one_size():
    sizes = ramp_up.build(None, 32)

    assert [sizes.size_at(step) for step in (0, 7)] == [32, 32]
    assert sizes.samples_before(7) == 7 * 32


class Numbers:
    """Samples that are their own numbers."""

    def __len__(self):
        return 10

    def shapes(self, batch_size):
        return {"numbers": ((batch_size,), np.int64)}

    def make(self, items_B, samples_B):
        return {"numbers": samples_B}


def numbers_from(start_step, num_steps, rows=slice(None)):
    splits = Splits(train=Numbers(), validation=Numbers(), fingerprint="", summary="")
    pipeline = input_pipeline.build(
        splits,
        seed=0,
        global_batch_size=12,
        rows=rows,
        sizes=ramp_up.build((4, 4, 16), 12),
    )
    batches = pipeline.train_batches(start_step)
    try:
        return [
            batch["numbers"].tolist() for batch in itertools.islice(batches, num_steps)
        ]
    finally:
        batches.close()


def test_every_sample_comes_once_and_in_order_from_any_step_on():
    whole = numbers_from(0, 6)

    assert [len(numbers) for numbers in whole] == [4, 4, 8, 12, 12, 12]
    assert sum(whole, []) == list(range(52))
    for start in range(5):
        assert numbers_from(start, 2) == whole[start : start + 2]


def test_processes_share_small_batches_as_they_share_large_ones():
    parts = [numbers_from(0, 5, rows) for rows in (slice(0, 6), slice(6, 12))]

    joined = [first + second for first, second in zip(*parts, strict=True)]
    assert joined == numbers_from(0, 5)
    assert {len(first) - len(second) for first, second in zip(*parts, strict=True)} == {
        0
    }


FIELDS = {
    "dist.data_parallel_size": 2,
    "train.global_batch_size": 12,
    "train.num_microbatches": 3,
    "train.rampup_batch_size": (4, 4, 16),
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    fields = {
        "dist.data_parallel_size": 8,
        "train.global_batch_size": 24,
        "train.num_microbatches": 3,
        "train.rampup_batch_size": (8, 8, 32),
    }
    return tiny_runs.launcher(tmp_path_factory.mktemp("corpus"), **fields)


@pytest.fixture(scope="module")
def finished(launch, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    assert launch(workdir) == 0
    return workdir


def test_run_goes_through_all_sizes(finished):
    records = [r for r in tiny_runs.numbers_of(finished) if "loss" in r]

    assert [r["global_batch_size"] for r in records] == [8, 8, 16, 24, 24, 24]
    assert records[-1]["loss"] < records[0]["loss"]


def test_run_resumed_within_the_ramp_up_is_the_same(launch, finished, tmp_path):
    tiny_runs.check_resumed(launch, finished, tmp_path / "resumed")


def test_first_small_batch_is_a_part_of_the_first_whole_one(launch, finished, tmp_path):
    fields = {"train.rampup_batch_size": None, "train.num_steps": 2}
    assert launch(tmp_path / "plain", **fields) == 0

    (first, second) = [
        r for r in tiny_runs.numbers_of(tmp_path / "plain") if "loss" in r
    ]
    assert "global_batch_size" not in first
    assert second["loss"] < first["loss"]
    # The same weights on a part of the same samples.
    ramped = tiny_runs.numbers_of(finished)[0]
    np.testing.assert_allclose(ramped["loss"], first["loss"], rtol=0.02)
    assert ramped["loss"] != first["loss"]


@pytest.mark.parametrize(
    ("rampup", "message"),
    [
        ((12, 4, 16), "begins with 12, which is not below train.global_batch_size=12"),
        (
            (4, 3, 16),
            "does not lead from 4 to train.global_batch_size=12 in steps of 3",
        ),
        ((6, 2, 16), "6 and 2 must be multiples of 4, the samples of a microbatch on"),
        ((4, 4, 0), "must be three numbers of at least 1. Use None for no ramp-up."),
    ],
)
def test_sizes_that_do_not_divide_are_an_error(rampup, message):
    fields = FIELDS | {"train.rampup_batch_size": rampup}

    with pytest.raises(resolve.ConfigError) as error:
        resolve.resolve(
            resolve.load("configs/gpt2_tiny.py"),
            {name: str(value) for name, value in fields.items()},
            DeviceCount(num_devices=2),
        )

    assert f"train.rampup_batch_size={rampup}" in str(error.value)
    assert message in str(error.value)


def test_first_batch_must_have_enough_microbatches_for_the_pipeline():
    fields = FIELDS | {
        "dist.data_parallel_size": 1,
        "dist.pipeline_parallel_size": 2,
        "dist.pipeline_schedule": "interleaved_1f1b",
        "dist.pipeline_num_chunks": 1,
        "train.num_microbatches": 6,
        "train.rampup_batch_size": (2, 2, 8),
    }

    with pytest.raises(resolve.ConfigError, match="num_microbatches=1"):
        resolve.resolve(
            resolve.load("configs/gpt2_tiny.py"),
            {name: str(value) for name, value in fields.items()},
            DeviceCount(num_devices=2),
        )
