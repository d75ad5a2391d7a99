"""Training adapters: the same on every layout, and nothing else moves or is sent."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from launch import adapters, job, resolve, state, step
from launch.resolve import ConfigError, DeviceCount
from models.stacked import path_of
from tests import hlo
from tests.launch.cases import Case, make_batch

FIELDS = {
    "model.num_layers": 3,
    "lora.rank": 2,
    "lora.targets": "blocks/*/attention/qkv,blocks/*/attention/out,blocks/*/mlp/*",
    "lora.train_also": "pooler/*,next_sentence/*",
}
NUM_STEPS = 3


def case_of(zero=0, **sizes):
    fields = FIELDS | {"zero.stage": zero, "zero.min_size": 1}
    return Case(**sizes, fields=tuple(fields.items()))


ONE = case_of()
LAYOUTS = [
    case_of(data=2, tensor=2),
    case_of(tensor=2, stage=2),
    case_of(data=2, zero=3),
]
SLOW = [case_of(data=2, zero=2), case_of(data=2, tensor=2, stage=2)]


def name_of(case):
    return (
        f"{case.data}x{case.tensor}x{case.stage}-zero{dict(case.fields)['zero.stage']}"
    )


@dataclasses.dataclass(frozen=True)
class Trained:
    """Parameters before and after some steps, in the order of the model."""

    before: dict
    after: dict
    losses: list
    opt_state: object
    text: str


def paths_of(tree):
    return {path_of(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@functools.cache
def train(case):
    """Runs some steps from random weights, the same on every layout."""
    config = case.config
    steps = job.build_steps(config, case.mesh)
    order = np.array(steps.model.layer_order)

    def draw(path, leaf):
        r = np.random.default_rng(sum(path_of(path).encode()))
        num = (config.model.num_layers,) if path[0].key == "blocks" else ()
        shape = (*num, *leaf.shape[len(num) :])
        value = r.standard_normal(shape) * 0.05 + (path[-1].key == "scale")
        value = value.astype(leaf.dtype)
        if not num:
            return value
        used = (order >= 0).reshape(-1, *[1] * (value.ndim - 1))
        return np.where(used, value[order], 0).astype(leaf.dtype)

    before = jax.tree.map_with_path(draw, steps.model.shapes)
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    train_state = jax.device_put(
        dataclasses.replace(zeros, params=before), steps.shardings, may_alias=False
    )
    program = step.build_train_step(steps)
    program = program.lower(abstract, make_batch(config)).compile()
    losses = []
    for number in range(NUM_STEPS):
        batch = jax.device_put(
            make_batch(config, number), program.input_shardings[0][1]
        )
        train_state, metrics = program(train_state, batch)
        losses.append(float(metrics["loss"]))

    places = [list(order).index(layer) for layer in range(config.model.num_layers)]

    def arrange(params):
        params = jax.device_get(params)
        blocks = jax.tree.map(lambda leaf: leaf[np.array(places)], params["blocks"])
        return {**params, "blocks": blocks}

    return Trained(
        before=arrange(before),
        after=arrange(train_state.params),
        losses=losses,
        opt_state=train_state.opt_state,
        text=program.as_text(),
    )


def is_trained(path):
    heads = ("pooler", "next_sentence")
    return "lora_" in path or path.split("/")[0] in heads


def test_only_adapters_and_heads_move():
    trained = train(ONE)
    before, after = paths_of(trained.before), paths_of(trained.after)

    same = {path for path in before if before[path].tobytes() == after[path].tobytes()}

    assert same == {path for path in before if not is_trained(path)}
    assert sum("lora_" in path for path in before) == 8


def test_optimizer_holds_nothing_of_what_is_frozen():
    trained = train(ONE)
    sizes = [x.size for p, x in paths_of(trained.before).items() if is_trained(p)]

    held = [leaf.size for leaf in jax.tree.leaves(trained.opt_state) if leaf.ndim]

    assert sorted(held) == sorted(sizes * 2)  # the two moments of Adam


@pytest.mark.parametrize(
    "case",
    [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=name_of,
)
def test_layout_makes_no_difference(case):
    expected, found = train(ONE), train(case)

    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    wanted = paths_of(expected.after)
    for path, leaf in paths_of(found.after).items():
        np.testing.assert_allclose(leaf, wanted[path], atol=1e-4, err_msg=path)


def test_what_crosses_data_is_of_adapters_and_heads_alone():
    case = LAYOUTS[0]
    steps = job.build_steps(case.config, case.mesh)
    shapes, specs = paths_of(steps.model.shapes), paths_of(steps.specs)

    def num_bytes(path):
        parts = 1 + ("tensor" in specs[path])
        return 4 * int(np.prod(shapes[path].shape)) // parts

    over_data = [
        found
        for found in hlo.collectives(train(case).text)
        if "data" in found.axes(case.mesh.shape)
    ]
    sent = sum(found.num_bytes for found in over_data)
    needed = sum(num_bytes(path) for path in shapes if is_trained(path))
    smallest_frozen = 4 * 16  # a bias

    assert needed <= sent < needed + smallest_frozen


def test_patterns_that_fit_nothing_are_errors_of_the_config():
    values = resolve.load("configs/bert_tiny.py")
    fields = {
        "lora.rank": "2",
        "lora.targets": "blocks/*/mlp/wide",
        "lora.train_also": "classifier/*",
    }

    with pytest.raises(ConfigError) as failure:
        resolve.resolve(values, fields, DeviceCount(num_devices=1))

    message = str(failure.value)
    assert "lora.targets: 'blocks/*/mlp/wide' matches no layer. Linear" in message
    assert "lora.train_also: 'classifier/*' matches no parameter. Heads" in message


def test_flops_of_frozen_weights_are_not_counted():
    """Of GPT-2's products with weights, one of the two backward ones is left."""
    sizes = {"num_layers": 2, "model_dim": 8, "mlp_dim": 16, "num_heads": 2}
    fields = {f"model.{name}": str(size) for name, size in sizes.items()}
    fields |= {"model.name": "gpt2", "model.vocab_size": "100", "model.max_len": "16"}
    fields |= {"data.seq_length": "16", "train.global_batch_size": "4"}

    def flops_of(**lora):
        given = fields | {f"lora.{name}": value for name, value in lora.items()}
        config = resolve.resolve({}, given, DeviceCount(num_devices=1))
        steps = job.build_steps(config, ONE.mesh)
        return adapters.train_flops(config, steps.model)

    kernels = 2 * (3 * 8 * 8 + 8 * 8 + 2 * 8 * 16)
    added = 2 * (8 * 2 + 2 * 16)  # the adapters of mlp/up, of rank 2
    frozen = kernels + 8 * 128  # the padded vocabulary
    num_tokens = 4 * 16

    found = flops_of(rank="2", targets="blocks/*/mlp/up")

    assert found == flops_of() + 2 * num_tokens * (3 * added - frozen)
    with_table = flops_of(
        rank="2", targets="blocks/*/mlp/up", train_also="token/embedding"
    )
    assert with_table == found + 2 * num_tokens * 8 * 128
