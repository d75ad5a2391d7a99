"""Gradients of the training step on several layouts, of every model.

The weights are those of the golden files, so that the expected values are known twice:
from one device, and from `transformers`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launch import distributed, job, resolve, state, step
from launch.context_parallel import SEQUENCES
from launch.resolve import DeviceCount
from tests.models import cases
from tests.models.cases import (
    FAMILIES,
    LAYOUT_TOLERANCE,
    SOFTWARE_TOLERANCE,
    assert_close,
)

# LLVM's effort, which takes longer than all of XLA's, makes no other program.
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# Keeps the gradients as its state and changes nothing.
KEEP_GRADIENTS = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda gradients, state, params: (
        jax.tree.map(jnp.zeros_like, gradients),
        gradients,
    ),
)
DROPPING = dict(dropout_rate=0.1, attention_dropout_rate=0.1, stochastic_depth_rate=0.3)
LAYOUTS = {  # data, tensor, stage, context
    "one": (1, 1, 1, 1),
    "dp2_tp2_pp2": (2, 2, 2, 1),
    "dp4": (4, 1, 1, 1),
    "tp4": (1, 4, 1, 1),
    "pp4": (1, 1, 4, 1),
    "dp2_cp2": (2, 1, 1, 2),
}


def build(name, layout, fields):
    """Returns what the step of a layout is built from."""
    data, tensor, stage, context = LAYOUTS[layout]
    model = dataclasses.asdict(cases.load(name).config) | fields
    values = {
        "model": {"name": name, **model},
        "train": {"global_batch_size": 4, "num_microbatches": 4 // data},
        "data": {} if name == "vit" else {"seq_length": 12},
        "dist": {
            "data_parallel_size": data,
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": stage,
            "context_parallel_size": context,
        },
    }
    devices = DeviceCount(num_devices=data * tensor * stage * context)
    config = resolve.resolve(values, {}, devices)
    mesh = distributed.create_mesh(config.dist, devices)
    steps = job.build_steps(config, mesh)
    shardings = state.state_shardings(
        steps.model, KEEP_GRADIENTS, specs=steps.specs, mesh=mesh
    )
    return dataclasses.replace(steps, optimizer=KEEP_GRADIENTS, shardings=shardings)


def train_once(name, layout, **fields):
    """Returns loss and gradients of a step on a layout, with changes of the config."""
    case, steps = cases.load(name), build(name, layout, fields)
    assert steps.model.layer_order == tuple(range(4))
    params = jax.tree.map(np.array, case.params)  # copies: the step takes them over
    start = state.TrainState(
        step=np.int32(0), params=params, opt_state=jax.tree.map(np.zeros_like, params)
    )
    start = jax.device_put(start, steps.shardings, may_alias=False)
    program = step.build_train_step(steps).lower(start, case.batch)
    after, metrics = program.compile(COMPILER_OPTIONS)(start, case.batch)
    return metrics["loss"], after.opt_state


@functools.cache
def one_device(name):
    """Returns loss and gradients without any of `launch`."""
    case = cases.load(name)
    gradient = jax.value_and_grad(lambda p: cases.stacked_objective(case, p)[0])
    return jax.jit(gradient, compiler_options=COMPILER_OPTIONS)(case.params)


def check(name, layout):
    case = cases.load(name)
    loss, gradients = train_once(name, layout)
    assert_close((loss, gradients), one_device(name), LAYOUT_TOLERANCE)
    published = case.to_params(case.golden.gradients)
    assert_close(gradients, published, SOFTWARE_TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_in_three_dimensions_are_those_of_one_device(name):
    check(name, "dp2_tp2_pp2")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp4", "tp4", "pp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_other_layouts_are_those_of_one_device(name, layout):
    check(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEQUENCES)
def test_gradients_of_spread_sequences_are_those_of_one_device(name):
    check(name, "dp2_cp2")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_dropped_does_not_depend_on_the_layout(name):
    one = train_once(name, "one", **DROPPING)
    many = train_once(name, "dp2_tp2_pp2", **DROPPING)
    assert_close(many, one, LAYOUT_TOLERANCE)
    assert abs(one[0] - one_device(name)[0]) > 1e-3
