"""The comparison of pipelines measures what it says."""

import json

import pytest

from benchmarks import pipeline
from launch import resolve
from tests.benchmarks.test_train_step import arguments  # noqa: F401 - a fixture


@pytest.mark.slow
def test_record_has_every_schedule_and_its_bound(arguments, capsys):  # noqa: F811 - the fixture
    fields = ["train.num_microbatches=4", "train.global_batch_size=16"]
    sizes = [
        "dist.data_parallel_size=4",
        "dist.pipeline_parallel_size=2",
        "model.num_layers=4",
    ]
    changed = [f"--config.{field}" for field in (*fields, *sizes)]
    schedules = "--schedules=1f1b,interleaved_1f1b"
    pipeline.main([*arguments, *changed, schedules, "--num_runs=3"])
    *table, line = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["layout"] == "dp4_tp1_pp2"
    single = record["single_stage_step_seconds_median"]
    assert record["schedules"].keys() == {"1f1b", "interleaved_1f1b"}
    for name, result in record["schedules"].items():
        ratio = result["step_seconds_median"] / single
        assert result["step_over_single_stage"] == pytest.approx(ratio)
        assert result["step_num_runs"] == 3
        assert any(f"{name} / 1 stage" in row for row in table)
    # The bubble: (S - 1) / M of 1F1B, divided by the chunks if interleaved.
    assert record["schedules"]["1f1b"]["bubble_bound"] == pytest.approx(1 + 1 / 4)
    interleaved = record["schedules"]["interleaved_1f1b"]["bubble_bound"]
    assert interleaved == pytest.approx(1 + 1 / 8)


def test_bound_is_that_of_the_schedule():
    fields = {"dist.pipeline_parallel_size": "4", "train.num_microbatches": "16"}
    config = resolve.resolve(
        {"model": {"name": "bert", "num_layers": 4}},
        fields,
        resolve.DeviceCount(num_devices=4),
    )
    assert pipeline.bound(config) == pytest.approx((16 + 3) / 16)
