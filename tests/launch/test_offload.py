"""Optimizer state in the memory of the host."""

import dataclasses

import jax
import numpy as np
import pytest

from launch import job, offload, resolve, state
from launch.checkpoint import Checkpointer
from launch.step import build_train_step
from tests.launch import cases
from tests.launch.batches import NO_DATA
from tests.launch.cases import Case

OFFLOAD = (
    ("model.num_layers", 2),
    ("model.num_heads", 2),
    ("optim.offload", True),
    ("model.dtype", "float16"),  # a step may be skipped
    ("zero.stage", 1),
    ("zero.min_size", 1),
)
CASE = Case(2, 1, 2, fields=OFFLOAD)


def run(case, num_steps=3):
    """The state after some steps, from the weights of the seed."""
    steps = job.build_steps(case.config, case.mesh)
    current = state.create_state(
        steps.model,
        steps.optimizer,
        seed=0,
        shardings=steps.shardings,
        loss_scaling=steps.loss_scaling,
    )
    program, found = build_train_step(steps), []
    for number in range(num_steps):
        current, metrics = program(current, cases.make_batch(case.config, number))
        found.append(float(metrics["loss"]))
    return steps, current, found


@pytest.fixture(scope="module")
def offloaded():
    return run(CASE)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def test_moments_are_on_the_host_and_parameters_on_the_devices(offloaded):
    _, current, _ = offloaded

    assert kinds(current.opt_state) == {"pinned_host"}
    assert kinds(current.params) == {"device"}


def test_training_is_the_same_as_without(offloaded):
    fields = tuple(field for field in OFFLOAD if field[0] != "optim.offload")
    _, current, losses = offloaded

    _, expected, expected_losses = run(dataclasses.replace(CASE, fields=fields))

    assert losses == expected_losses
    assert kinds(expected.opt_state) == {"device"}
    jax.tree.map(np.testing.assert_array_equal, current, expected)


def test_checkpoint_goes_back_to_the_host(offloaded, tmp_path):
    steps, current, _ = offloaded
    run = job.Job(config=CASE.config, mesh=steps.mesh, data=NO_DATA, steps=steps)

    with Checkpointer(tmp_path / "run") as checkpointer:
        saved = run.saved_form.to_saved(current)
        checkpointer.save(3, saved, extra=run.extra(3))
        checkpointer.wait()
        restored = run.restore(checkpointer)

    assert kinds(restored.opt_state) == {"pinned_host"}
    jax.tree.map(np.testing.assert_array_equal, restored, current)


def test_platform_without_such_memory_is_an_error():
    (problem,) = offload.missing(["device", "unpinned_host"], "tpu")

    assert "needs memory of the kind 'pinned_host', but devices of platform" in problem
    assert "'tpu' have 'device', 'unpinned_host'. Set optim.offload=False" in problem


def test_job_reports_what_the_devices_cannot_do(monkeypatch):
    monkeypatch.setattr(offload, "HOST", "moon")

    with pytest.raises(resolve.ConfigError, match="memory of the kind 'moon'"):
        job.build(CASE.config, CASE.mesh)
