"""A run says in what it differs from the one whose checkpoint it goes on from."""

import dataclasses

import pytest

from launch import distributed, job, resolve
from launch.resolve import DeviceCount


@pytest.fixture(scope="module")
def built():
    devices = DeviceCount(num_devices=1)
    config = resolve.resolve(resolve.load("configs/vit_tiny.py"), {}, devices)
    return job.build(config, distributed.create_mesh(config.dist, devices))


def test_nothing_is_different_in_the_same_run(built):
    assert built.changes_since(built.extra(3)) == []


def test_fields_are_named_with_both_values_and_the_layout_is_not(built):
    config = resolve.to_values(built.config)
    config["optim"]["learning_rate"] = 0.5
    config["dist"]["data_parallel_size"] = 8
    now = built.config.optim.learning_rate

    changes = built.changes_since({**built.extra(3), "config": config})

    assert changes == [f"optim.learning_rate: 0.5 -> {now}"]


def test_other_data_under_the_same_config_is_named(built):
    extra = built.extra(3)
    splits = dataclasses.replace(built.data.splits, fingerprint="of other files")
    data = dataclasses.replace(built.data, splits=splits)
    changed = dataclasses.replace(built, data=data)

    assert changed.changes_since(extra) == ["the contents of the data"]
    del extra["data"]  # as `launch.convert` leaves it
    assert changed.changes_since(extra) == []
