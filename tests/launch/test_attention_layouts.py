"""What a run takes for attention, and attention by blocks on every kind of layout."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from launch import attention, resolve
from launch.resolve import DeviceCount
from models.layers import BlockConfig
from tests import hlo
from tests.launch.cases import Case, compile_step, train

FIELDS = (
    ("model.num_layers", 4),
    ("train.global_batch_size", 8),
    ("model.attention_dropout_rate", 0.2),
)
LAYOUTS = {
    "one": Case(),
    "data_tensor": Case(data=2, tensor=2, fields=(("remat", "selective"),)),
    "three": Case(data=2, tensor=2, stage=2),
    "zero_bubble": Case(tensor=2, stage=2, schedule="zero_bubble"),
}
HALF = BlockConfig(dtype="bfloat16")


def case_of(layout, name):
    case = LAYOUTS[layout]
    fields = (*FIELDS, ("model.attention", name), *case.fields)
    return dataclasses.replace(case, fields=fields)


@pytest.mark.parametrize(
    "layout",
    ["data_tensor", "zero_bubble", pytest.param("three", marks=pytest.mark.slow)],
)
def test_blocked_trains_as_plain_does_on_one_device(layout):
    one, many = train(case_of("one", "plain"), 2), train(case_of(layout, "blocked"), 2)
    np.testing.assert_allclose(many.losses, one.losses, rtol=1e-6)
    for path, expected in jax.tree_util.tree_leaves_with_path(one.gradients):
        found = dict(jax.tree_util.tree_leaves_with_path(many.gradients))[path]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * scale)


def test_blocked_communicates_no_more_over_tensor_than_plain():
    counts = [
        collections.Counter(
            (found.name, found.axes(case.mesh.shape), len(found.loops))
            for found in hlo.collectives(compile_step(case).as_text())
        )
        for case in (case_of("data_tensor", name) for name in ("plain", "blocked"))
    ]
    assert counts[0] == counts[1]
    assert counts[0]["all-reduce", ("tensor",), 2] == 4


@pytest.mark.parametrize(
    ("config", "platform", "length", "name"),
    [
        (BlockConfig(), "cpu", 128, "plain"),
        (BlockConfig(), "cpu", 1024, "blocked"),
        (BlockConfig(attention="plain"), "cpu", 1024, "plain"),
        (BlockConfig(attention="blocked"), "gpu", 128, "blocked"),
        (HALF, "gpu", 128, "cudnn"),
        (HALF, "cuda", 128, "cudnn"),
        (BlockConfig(), "gpu", 1024, "plain"),
        (HALF, "gpu", 197, "plain"),
        (dataclasses.replace(HALF, num_heads=32), "gpu", 128, "plain"),
        (dataclasses.replace(HALF, attention_dropout_rate=0.1), "gpu", 128, "plain"),
    ],
)
def test_auto_is_what_the_devices_can_do_best(config, platform, length, name):
    assert attention.choose(config, platform=platform, length=length) == name


def test_auto_does_without_cudnn_where_there_is_none():
    sizes = dict(platform="gpu", length=128)
    assert attention.choose(HALF, **sizes, has_cudnn=False) == "plain"
    asked = dataclasses.replace(HALF, attention="cudnn")
    assert attention.choose(asked, **sizes, has_cudnn=False) == "cudnn"


@pytest.mark.parametrize(
    ("devices", "fields", "rule"),
    [
        (
            DeviceCount(num_devices=None),
            {},
            "model.attention='cudnn' runs on GPUs, but the devices of this run are of"
            " platform 'cpu'. Use 'auto' or 'blocked'.",
        ),
        (
            DeviceCount(num_devices=1, platform="gpu"),
            {"data.seq_length": 127},
            "model.attention='cudnn' works on an even number of positions, but there"
            " are 127.",
        ),
    ],
    ids=["platform", "length"],
)
def test_cudnn_where_it_cannot_run_is_an_error(devices, fields, rule):
    fields = {"model.attention": "cudnn", "model.dtype": "bfloat16"} | fields
    values = resolve.load("configs/bert_tiny.py")
    overrides = {name: str(value) for name, value in fields.items()}
    overrides["model.attention_dropout_rate"] = "0.0"
    with pytest.raises(resolve.ConfigError, match=rule.replace(".", r"\.")):
        resolve.resolve(values, overrides, devices)
