"""The compiled training step, on shapes that tell its parts apart."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from launch import families, job, resolve, state, step
from launch.resolve import DeviceCount

VOCAB_SIZE = 384  # no other size of the program is this, or a part of it
FIELDS = {
    "model.num_layers": 2,
    "model.model_dim": 32,
    "model.mlp_dim": 80,
    "model.vocab_size": VOCAB_SIZE - 10,
    "data.seq_length": 32,
    "train.global_batch_size": 8,
    "train.num_microbatches": 2,
}


def build(data, tensor):
    """Returns the step's config on data x tensor devices, and a batch."""
    sizes = {"dist.data_parallel_size": data, "dist.tensor_parallel_size": tensor}
    config = resolve.resolve(
        resolve.load("configs/bert_tiny.py"),
        {name: str(value) for name, value in (FIELDS | sizes).items()},
        DeviceCount(num_devices=data * tensor),
    )
    devices = np.array(jax.devices()[: data * tensor]).reshape(1, data, tensor)
    axes = ("stage", "data", "tensor")
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 3)
    steps = job.build_steps(config, mesh)
    shapes = families.batch_shapes(config)
    batch = {
        name: np.ones(leaf.shape, leaf.dtype)
        if leaf.dtype != np.int32
        else np.random.default_rng(0).integers(0, 2, leaf.shape, np.int32)
        for name, leaf in shapes.items()
    }
    return steps, batch


@pytest.fixture(scope="module")
def cut():
    """A step on 2 x 4 devices, compiled, with its state."""
    steps, batch = build(2, 4)
    program = step.build_train_step(steps)
    train_state = state.create_state(
        steps.model, steps.optimizer, seed=0, shardings=steps.shardings
    )
    return program.lower(train_state, batch).compile(), train_state, batch


def test_no_device_has_the_logits_of_the_whole_vocabulary(cut):
    program = cut[0].as_text()
    sizes = {
        int(n)
        for dims in re.findall(r"f32\[([\d,]+)\]", program)
        for n in dims.split(",")
    }

    assert VOCAB_SIZE // 4 in sizes
    assert VOCAB_SIZE not in sizes


def test_state_lies_as_the_table_says_and_is_no_larger_after_a_step(cut):
    program, train_state, batch = cut
    before = jax.tree.map(lambda x: str(x.sharding.spec), train_state)

    after, metrics = program(train_state, batch)

    assert before == jax.tree.map(lambda x: str(x.sharding.spec), after)
    table = after.params["embeddings"]["token"]["embedding"]
    assert table.addressable_shards[0].data.shape == (VOCAB_SIZE // 4, 32)
    moments = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim == 2]
    assert any(m.addressable_shards[0].data.shape[0] == 96 for m in moments)
    assert int(after.step) == 1
    assert metrics["loss"] == metrics["mlm_loss"] + metrics["nsp_loss"]


def test_evaluation_adds_up_batches_by_what_they_hold():
    steps, batch = build(1, 1)
    evaluate = step.build_eval_step(steps)
    params = state.create_state(
        steps.model, steps.optimizer, seed=0, shardings=steps.shardings
    ).params
    half = {name: value.copy() for name, value in batch.items()}
    half["weights"][4:] = 0
    half["sample_weights"][4:] = 0

    sums, counts = evaluate(params, half)

    assert counts["nsp_loss"] == 4
    assert counts["mlm_loss"] == half["weights"].sum()
    # Samples without weight count for nothing, whatever they hold.
    half["tokens"][4:] = 7
    changed, _ = evaluate(params, half)
    jax.tree.map(np.testing.assert_array_equal, sums, changed)


def test_parameters_do_not_depend_on_the_layout():
    trees = []
    for layout in ((1, 1), (2, 4)):
        steps, _ = build(*layout)
        created = state.create_state(
            steps.model, steps.optimizer, seed=3, shardings=steps.shardings
        )
        trees.append(jax.device_get(created.params))

    jax.tree.map(np.testing.assert_array_equal, *trees)
