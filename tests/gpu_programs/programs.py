"""Training steps of H100 that are not there, to be compiled and read."""

import dataclasses
import math
from typing import Any

import pytest
from jax.sharding import Mesh

from launch import families, job, resolve, state, step, virtual_gpus
from launch.step import StepConfig

MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not virtual_gpus.has_plugin(),
        reason="needs JAX's CUDA plugin: pip install -e '.[plan]'",
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered:
    """A training step, not compiled yet, and what it was built from."""

    steps: StepConfig
    mesh: Mesh
    batch: Any
    program: Any


def lower_step(experiment, fields):
    """The training step of an experiment with some fields, for as many GPUs as needed.

    Args:
        experiment: Name of a file of `configs`.
        fields: Values by dotted field, the data-parallel size among them.
    """
    sizes = [n for field, n in fields.items() if field.endswith("_parallel_size")]
    config = resolve.resolve(
        resolve.load(f"configs/{experiment}.py"),
        {field: str(value) for field, value in fields.items()},
        resolve.DeviceCount(num_devices=math.prod(sizes), platform="cuda"),
    )
    mesh = virtual_gpus.create_mesh(config.dist, "h100-80g")
    steps = job.build_steps(config, mesh)
    batch = families.batch_shapes(config)
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    program = step.build_train_step(steps).lower(abstract, batch)
    return Lowered(steps=steps, mesh=mesh, batch=batch, program=program)


def describe(memory):
    """A line on the memory that one GPU needs."""
    return (
        f"state and batch {memory.argument_size_in_bytes / 1e9:.2f} GB, in the step"
        f" {memory.temp_size_in_bytes / 1e9:.2f} GB"
    )
