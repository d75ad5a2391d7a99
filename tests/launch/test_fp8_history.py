"""Products in eight bits with scales from the steps before, in whole training steps."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest

from launch import distributed, job, resolve, trained
from launch.checkpoint import Checkpointer
from launch.precision import PrecisionConfig
from launch.resolve import DeviceCount
from tests.launch import cases, tiny_runs
from tests.launch.cases import Case

LENGTH = 3
DELAYED = {
    "precision.matmul": "fp8",
    "precision.fp8_scaling": "delayed",
    "precision.fp8_history": LENGTH,
}
SIZES = {
    "model.num_layers": 2,
    "model.model_dim": 32,
    "model.num_heads": 2,
    "model.mlp_dim": 64,
    "model.dtype": "bfloat16",
}
NUM_STEPS = 6


def case_of(*sizes, num_microbatches=None, schedule="1f1b", **fields):
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return Case(
        *sizes,
        schedule=schedule,
        num_microbatches=num_microbatches,
        fields=tuple((SIZES | DELAYED | named).items()),
    )


ONE_DEVICE = case_of(1, 1, 1)
LAYOUTS = {
    "dp2_zero1": case_of(2, num_microbatches=1, zero__stage=1, zero__min_size=1),
    "tp2_pp2": case_of(1, 2, 2),
}
SLOW_LAYOUTS = {
    "dp2_zero3": case_of(2, zero__stage=3, zero__min_size=1),
    "pp2_zero_bubble": case_of(1, 1, 2, schedule="zero_bubble"),
}


@functools.cache
def run(case):
    """The losses of a few steps, and the history after them in the order of layers."""
    program, at = cases.compile_step(case), cases.create_state(case)
    losses = []
    for number in range(NUM_STEPS):
        at, metrics = program(at, cases.make_batch(case.config, number % 2))
        losses.append(float(metrics["loss"]))
    order = cases.make_steps(case).model.layer_order
    places = np.array([order.index(layer) for layer in range(2)])
    return losses, jax.tree.map(lambda x: np.asarray(x)[places], at.fp8["blocks"])


def test_every_map_of_every_layer_has_seen_its_tensors():
    _, history = run(ONE_DEVICE)

    paths = [
        jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in by_path(history)
    ]
    assert paths == ["attention/out", "attention/qkv", "mlp/down", "mlp/up"]
    for _, leaf in by_path(history):
        assert leaf.shape == (2, 3, LENGTH)
        assert (leaf > 0).all()
        exponents = np.log2(leaf)
        np.testing.assert_array_equal(exponents, np.round(exponents))
    kernel = history["mlp"]["up"][:, 1]
    highest = np.abs(
        cases.initial_params("bert", ONE_DEVICE.config.model)["blocks"]["mlp"]["up"][
            "kernel"
        ]
    ).max((1, 2))
    # Weights have moved by a few hundredths since.
    assert (kernel * 448 < 4 * highest[:, None]).all()
    assert (kernel * 448 > 0.5 * highest[:, None]).all()


def by_path(tree):
    return jax.tree.leaves_with_path(tree)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_with_one_device(name):
    check_layout(LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_LAYOUTS)
def test_more_layouts_agree_with_one_device(name):
    check_layout(SLOW_LAYOUTS[name])


def check_layout(case):
    losses, history = run(case)

    expected_losses, expected = run(ONE_DEVICE)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-3)
    ratios = [
        (ours / theirs).ravel()
        for ours, theirs in zip(
            jax.tree.leaves(history), jax.tree.leaves(expected), strict=True
        )
    ]
    found = np.concatenate(ratios)
    # A largest element near a power of two may fall on either side of it.
    assert set(found) <= {0.5, 1.0, 2.0}
    assert (found == 1).mean() > 0.9


def test_losses_are_close_to_those_of_current_scaling():
    losses, _ = run(ONE_DEVICE)

    current = dict(ONE_DEVICE.fields) | {"precision.fp8_scaling": "current"}
    others = dataclasses.replace(ONE_DEVICE, fields=tuple(current.items()))
    expected = cases.train(others, NUM_STEPS).losses
    np.testing.assert_allclose(losses, expected, rtol=0.01)
    assert losses[-1] < losses[0] - 0.2


RUN = {"model.dtype": "float16", "dist.pipeline_parallel_size": 2, **DELAYED}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs the command line on a small text and returns the exit code."""
    fields = RUN | {"dist.data_parallel_size": 4, "train.num_microbatches": 2}
    return tiny_runs.launcher(tmp_path_factory.mktemp("corpus"), **fields)


@pytest.fixture(scope="module")
def finished(launch, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    assert launch(workdir) == 0
    return workdir


def test_resumed_run_is_bitwise_the_same(launch, finished, tmp_path):
    tiny_runs.check_resumed(launch, finished, tmp_path / "resumed")


def restore(workdir, **fields):
    """Opens a run on one device with other fields, and returns its state."""
    named = {name.replace("__", "."): str(value) for name, value in fields.items()}
    one = {f"dist.{axis}_parallel_size": "1" for axis in ("data", "pipeline")}
    devices = DeviceCount(num_devices=1)
    values = resolve.load(str(workdir / "config.yaml"))
    config = resolve.resolve(values, one | named, devices)
    built = job.build(config, distributed.create_mesh(config.dist, devices))
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        return built.restore(checkpointer)


def test_another_layout_reads_the_history(finished):
    restored = restore(finished)

    leaves = jax.tree.leaves(jax.device_get(restored.fp8))
    assert len(leaves) == 4
    for leaf in leaves:
        assert leaf.shape == (2, 3, LENGTH)
        assert (leaf[:, :2] > 0).all()


def test_run_may_change_the_length_of_its_history(finished):
    restored = restore(finished, precision__fp8_history=5)

    leaves = jax.tree.leaves(restored.fp8)
    assert {leaf.shape for leaf in leaves} == {(2, 3, 5)}
    assert not any(np.asarray(leaf).any() for leaf in leaves)
    assert restored.step == 6


def test_run_may_begin_or_end_with_current_scaling(finished, tmp_path):
    ended = restore(finished, precision__fp8_scaling="current")
    assert ended.fp8 is None

    before = trained.open_trained(str(finished))
    jax.tree.map(np.testing.assert_array_equal, ended.params, before.params)

    config = resolve.to_values(before.config)
    config["precision"] |= {"fp8_scaling": "current"}
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        checkpointer.save(6, ended, extra={"config": config, "num_samples": 0})
    begun = restore(tmp_path / "run")
    leaves = jax.tree.leaves(begun.fp8)
    assert {leaf.shape for leaf in leaves} == {(2, 3, LENGTH)}
    assert not any(np.asarray(leaf).any() for leaf in leaves)
    jax.tree.map(np.testing.assert_array_equal, begun.params, ended.params)


def test_parameters_and_their_number_are_those_of_current_scaling():
    model, other = (
        cases.make_steps(case).model
        for case in (
            ONE_DEVICE,
            dataclasses.replace(ONE_DEVICE, fields=tuple(SIZES.items())),
        )
    )

    assert jax.tree.leaves_with_path(model.shapes) == jax.tree.leaves_with_path(
        other.shapes
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8_scaling": "late"}, "fp8_scaling='late' is not one of 'current'"),
        ({"fp8_history": 0}, "fp8_history=0 must be at least 1"),
        ({"fp8_scaling": "delayed"}, "matmul=None. Set matmul='fp8', or leave"),
    ],
)
def test_broken_rule_names_value_and_remedy(fields, message):
    (problem,) = PrecisionConfig(**fields).broken_rules()
    assert message in problem


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"lora.rank": 2}, "lora.rank=2"),
        (
            {"dist.sequence_parallel": True, "dist.tensor_parallel_size": 2},
            "dist.sequence_parallel=True",
        ),
    ],
)
def test_what_replaces_the_linear_maps_is_an_error(fields, name):
    fields = SIZES | DELAYED | fields
    with pytest.raises(resolve.ConfigError) as error:
        resolve.resolve(
            resolve.load("configs/gpt2_tiny.py"),
            {key: str(value) for key, value in fields.items()},
            DeviceCount(num_devices=2 if "dist" in name else 1),
        )

    assert f"but {name} replaces them. Use precision.fp8_scaling='cu" in str(
        error.value
    )
