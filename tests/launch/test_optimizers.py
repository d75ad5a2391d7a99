"""Update rules against references, on layouts, and how their state is kept."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from launch import job, optimizer, state, update
from launch.optimizers.matrices import matrix_of
from launch.optimizers.stored import round_at_random
from launch.run_config import OPTIMIZERS, OptimConfig
from tests.launch.cases import Case

NUM_LAYERS, DIM, HIDDEN, HEADS = 3, 8, 12, 2
RATE = 0.1


def draw(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make_tree(seed):
    """A stack of blocks and a table, with random values."""
    n = NUM_LAYERS
    return {
        "blocks": {
            "attention": {
                "qkv": {
                    "kernel": draw((n, DIM, 3, HEADS, 4), seed),
                    "bias": draw((n, 3, HEADS, 4), seed + 1),
                },
                "out": {"kernel": draw((n, HEADS, 4, DIM), seed + 2)},
            },
            "mlp": {"up": {"kernel": draw((n, DIM, HIDDEN), seed + 3)}},
        },
        "final_norm": {"scale": draw((DIM,), seed + 4)},
        "token": {"embedding": draw((20, DIM), seed + 5)},
    }


def to_matrices(tree):
    """Every matrix of the tree on its own, without stacks; and the other leaves."""
    attention = tree["blocks"]["attention"]
    up = tree["blocks"]["mlp"]["up"]["kernel"]
    found = {"token": tree["token"]["embedding"]}
    for layer in range(NUM_LAYERS):
        qkv = attention["qkv"]["kernel"][layer]
        found |= {f"qkv{layer}{i}": qkv[:, i].reshape(DIM, -1) for i in range(3)}
        found[f"out{layer}"] = attention["out"]["kernel"][layer].reshape(-1, DIM)
        found[f"up{layer}"] = up[layer]
    return found


def others(tree):
    return {
        "bias": tree["blocks"]["attention"]["qkv"]["bias"],
        "scale": tree["final_norm"]["scale"],
    }


def steps_of(rule, params, num_steps=3):
    """The parameters after a few updates with random gradients."""
    opt_state, run = rule.init(params), jax.jit(rule.update)
    for number in range(num_steps):
        updates, opt_state = run(make_tree(10 * number), opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state


def steps_of_parts(rule, take, num_steps=3):
    """The same of parts of the tree, which ``take`` gives."""
    params = take(make_tree(7))
    opt_state, run = rule.init(params), jax.jit(rule.update)
    for number in range(num_steps):
        updates, opt_state = run(take(make_tree(10 * number)), opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def build(name, **fields):
    optim = OptimConfig(name=name, learning_rate=RATE, schedule="constant", **fields)
    return optimizer.build(optim, num_steps=10)


def assert_close(found, wanted, rtol=1e-5):
    def compare(ours, theirs):
        np.testing.assert_allclose(ours, theirs, atol=rtol * np.abs(theirs).max())

    jax.tree.map(compare, found, wanted)


def test_matrices_have_rows_columns_and_one_index_for_each_other_dim():
    assert dataclasses.astuple(matrix_of("token/embedding", 2)) == ((0,), (1,))
    qkv = matrix_of("blocks/*/attention/qkv/kernel", 5)
    assert dataclasses.astuple(qkv) == ((1,), (3, 4))
    assert matrix_of("blocks/*/attention/out/kernel", 4).rows == (1, 2)
    assert matrix_of("patches/kernel", 4).columns == (3,)
    assert matrix_of("blocks/*/own/kernel", 4) is None


def test_muon_of_each_matrix_is_that_of_optax():
    found, _ = steps_of(build("muon", weight_decay=0.0), make_tree(7))
    theirs = optax.contrib.muon(RATE, beta=0.95, consistent_rms=0.2)
    adam = optax.adamw(RATE, weight_decay=0.0)

    def hidden(tree):
        return {k: v for k, v in to_matrices(tree).items() if k != "token"}

    def rest(tree):
        return others(tree) | {"token": tree["token"]["embedding"]}

    assert_close(hidden(found), steps_of_parts(theirs, hidden), rtol=2e-5)
    assert_close(rest(found), steps_of_parts(adam, rest))


def test_muon_makes_every_head_projection_orthogonal_on_its_own():
    rule, params = build("muon", weight_decay=0.0), make_tree(7)

    updates, _ = rule.update(make_tree(1), rule.init(params), params)

    for name, matrix in to_matrices(updates).items():
        if name != "token":
            scale = RATE * 0.2 * math.sqrt(max(matrix.shape))
            values = np.linalg.svd(np.asarray(matrix) / scale, compute_uv=False)
            assert 0.6 < values.min() < values.max() < 1.25, name


def test_lion_is_that_of_optax():
    fields = dict(betas=(0.9, 0.99), weight_decay=0.3)
    found, _ = steps_of(build("lion", **fields), make_tree(7))

    theirs = optax.lion(RATE, 0.9, 0.99, weight_decay=0.3)
    assert_close(to_matrices(found), steps_of_parts(theirs, to_matrices))
    plain = optax.lion(RATE, 0.9, 0.99, weight_decay=0.0)
    assert_close(others(found), steps_of_parts(plain, others))


def test_factored_moments_of_each_matrix_are_those_of_optax():
    rule = optimizer.scale_by_factored_rms()
    theirs = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    # Optax factors what has two dims, whatever it is.
    whole = optax.scale_by_factored_rms(factored=False)

    found, _ = steps_of(rule, make_tree(7))

    assert_close(to_matrices(found), steps_of_parts(theirs, to_matrices))
    assert_close(others(found), steps_of_parts(whole, others))


def test_adafactor_clips_and_scales_each_layer_on_its_own():
    rule, params, grads = (
        build("adafactor", weight_decay=0.2),
        make_tree(7),
        make_tree(1),
    )

    updates, _ = rule.update(grads, rule.init(params), params)

    for layer in range(NUM_LAYERS):
        kernel, grad, found = (
            np.asarray(tree["blocks"]["mlp"]["up"]["kernel"][layer], np.float64)
            for tree in (params, grads, updates)
        )
        squares = grad**2
        rows, columns = squares.mean(1, keepdims=True), squares.mean(0, keepdims=True)
        scaled = grad / np.sqrt(rows / rows.mean() * columns)
        clipped = scaled / max(1, np.sqrt((scaled**2).mean()))
        wanted = clipped * max(1e-3, np.sqrt((kernel**2).mean())) + 0.2 * kernel
        np.testing.assert_allclose(found, -RATE * wanted, rtol=2e-5, atol=1e-7)


def test_adafactor_keeps_a_vector_for_each_side_of_a_matrix():
    opt_state = jax.eval_shape(build("adafactor").init, make_tree(0))
    sizes = [leaf.size for leaf in jax.tree.leaves(opt_state)]

    num_params = sum(leaf.size for leaf in jax.tree.leaves(make_tree(0)))
    assert sum(sizes) < num_params / 2
    kernels = opt_state[1][0]
    assert kernels.rows["blocks"]["mlp"]["up"]["kernel"].shape == (3, DIM, 1)
    assert kernels.columns["blocks"]["mlp"]["up"]["kernel"].shape == (3, 1, HIDDEN)
    qkv = kernels.rows["blocks"]["attention"]["qkv"]["kernel"]
    assert qkv.shape == (3, DIM, 3, 1, 1)


def test_rounding_at_random_is_right_on_average_and_exact_where_it_can_be():
    x = jnp.concatenate([jnp.full(20_000, 1.001), jnp.array([0.0, 1.0, -2.5, 1e-30])])

    rounded = np.asarray(round_at_random(x, jax.random.key(0)), np.float32)

    assert set(rounded[:20_000]) == {1.0, 1.0078125}
    np.testing.assert_allclose(rounded[:20_000].mean(), 1.001, rtol=5e-5)
    np.testing.assert_array_equal(rounded[-4:-1], [0.0, 1.0, -2.5])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_in_half_precision_stay_close_and_fall(name):
    params, zeros = make_tree(7), jax.tree.map(jnp.zeros_like, make_tree(7))
    single, half = (build(name, state_dtype=dtype) for dtype in ("float32", "bfloat16"))

    found, opt_state = steps_of(half, params)
    expected, _ = steps_of(single, params)

    moments = [x for x in jax.tree.leaves(opt_state) if x.size > 3]
    assert {x.dtype for x in moments} == {jnp.dtype("bfloat16")}
    if name != "lion":  # whose updates are signs
        assert_close(found, expected, rtol=0.05)
    # A thousandth less a step: rounded to nearest it would stay for ever.
    run = jax.jit(half.update)
    before = max(float(jnp.abs(x).max()) for x in moments)
    for _ in range(300):
        _, opt_state = run(zeros, opt_state, params)
    after = [x for x in jax.tree.leaves(opt_state) if x.dtype == jnp.bfloat16]
    assert max(float(jnp.abs(x).max()) for x in after) < 0.9 * before


def test_parameters_in_half_precision_have_moments_in_single():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_tree(7))
    rule = build("adamw")

    opt_state = rule.init(params)
    updates, new = rule.update(params, opt_state, params)

    types = {x.dtype for x in jax.tree.leaves(opt_state) if x.ndim}
    assert types == {jnp.dtype("float32")}
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), new, opt_state)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


SIZES = (("model.num_layers", 4), ("model.num_heads", 2))
LAYOUTS = {
    "1x1x1": Case(model="gpt2", fields=SIZES),
    "2x2x1_zero": Case(
        2, 2, model="gpt2", fields=(*SIZES, ("zero.stage", 1), ("zero.min_size", 1))
    ),
    # Places of the stack without a layer, which hold zeros.
    "1x2x2_uneven": Case(
        1,
        2,
        2,
        model="gpt2",
        fields=(*SIZES, ("dist.pipeline_stage_layers", (3, 1))),
    ),
}


@functools.cache
def updated(layout, name):
    """Parameters after two updates with random gradients; the state as it lies."""
    case = LAYOUTS[layout]
    fields = (*case.fields, ("optim.name", name), ("optim.warmup_steps", 0))
    case = dataclasses.replace(case, fields=fields)
    steps = job.build_steps(case.config, case.mesh)
    order = np.array(steps.model.layer_order)

    def random(seed):
        def fill(path, leaf):
            # By layer, wherever a layout has it.
            is_block = path[0].key == "blocks"
            shape = (4, *leaf.shape[1:]) if is_block else leaf.shape
            crc = sum(map(ord, jax.tree_util.keystr(path)))
            values = np.random.default_rng((seed, crc)).normal(size=shape)
            if is_block:
                is_used = (order >= 0).reshape(-1, *[1] * (leaf.ndim - 1))
                values = np.where(is_used, values[order], 0)
            return values.astype(np.float32)

        return jax.device_put(
            jax.tree.map_with_path(fill, steps.model.shapes), steps.shardings.params
        )

    run = jax.jit(
        lambda current, grads: update.apply_gradients(
            current, grads, steps.optimizer, steps.learning_rate
        )[0],
        in_shardings=(steps.shardings, steps.shardings.params),
        out_shardings=steps.shardings,
    )
    current = state.begin(
        steps.model, random(0), steps.optimizer, shardings=steps.shardings
    )
    for seed in (1, 2):
        current = run(current, random(seed))
    places = np.array([order.tolist().index(layer) for layer in range(4)])
    params = jax.device_get(current.params)
    unused = jax.tree.map(lambda x: x[order < 0], params["blocks"])
    params["blocks"] = jax.tree.map(lambda x: x[places], params["blocks"])
    return params, unused, current.opt_state


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1x1x1"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_does_not_depend_on_the_layout(name, layout):
    expected, _, _ = updated("1x1x1", name)

    found, unused, _ = updated(layout, name)

    assert_close(found, expected, rtol=2e-6 if name != "muon" else 2e-5)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), unused)


def test_state_lies_like_the_parameter_it_belongs_to():
    _, _, adafactor = updated("1x2x2_uneven", "adafactor")
    rows, columns = adafactor[1][0].rows["blocks"], adafactor[1][0].columns["blocks"]

    up = rows["mlp"]["up"]["kernel"], columns["mlp"]["up"]["kernel"]
    assert [str(x.sharding.spec) for x in up] == [
        str(P("stage", None, None)),
        str(P("stage", None, "tensor")),
    ]
    _, _, muon = updated("1x2x2_uneven", "muon")
    for leaf in jax.tree.leaves(muon):
        if leaf.ndim > 2:
            assert leaf.sharding.spec[0] == "stage"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"name": "sgd"},
            "name='sgd' is not one of 'adamw', 'lamb', 'adafactor', 'lion",
        ),
        ({"momentum": 1.0}, "momentum=(1.0,) must all be at least 0 and below 1."),
        ({"state_dtype": "float16"}, "state_dtype='float16' is not one of 'float32', "),
    ],
)
def test_broken_rule_names_value_and_choices(fields, message):
    (problem,) = OptimConfig(**fields).broken_rules()
    assert problem.startswith(message)
