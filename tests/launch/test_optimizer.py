import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launch import optimizer
from launch.run_config import OptimConfig

NUM_STEPS = 100


def rates(**fields):
    optim = OptimConfig(learning_rate=2.0, **fields)
    rate = optimizer.learning_rate_schedule(optim, num_steps=NUM_STEPS)
    return np.array([float(rate(step)) for step in range(NUM_STEPS + 20)])


# Name -> share of the rate that is left after a share ``p`` of the steps.
CLOSED_FORMS = {
    "constant": lambda p: 1.0,
    "cosine": lambda p: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * p)),
    "polynomial": lambda p: 0.1 + 0.9 * (1 - p) ** 2,
    "exponential": lambda p: 0.1**p,
    "steps": lambda p: 0.5 ** (int(p >= 0.5) + int(p >= 0.75)),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_decay_equals_its_closed_form(name):
    found = rates(schedule=name, final_fraction=0.1, power=2.0, decay_factor=0.5)

    shares = np.minimum(np.arange(len(found)) / NUM_STEPS, 1.0)
    expected = 2.0 * np.array([CLOSED_FORMS[name](share) for share in shares])
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


def test_warmup_grows_linearly_to_where_the_decay_is_by_then():
    found = rates(schedule="cosine", warmup_steps=10)

    decay = rates(schedule="cosine")
    np.testing.assert_allclose(found[:10], decay[10] * np.arange(10) / 10, rtol=1e-6)
    np.testing.assert_allclose(found[10:], decay[10:])


def make_tree(seed):
    random = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    return {
        "blocks": {"up": {"kernel": draw(3, 4, 5), "bias": draw(3, 5)}},
        "final_norm": {"scale": draw(4)},
        "head": {"kernel": draw(4, 2)},
    }


def test_biases_and_norms_are_not_decayed():
    assert optimizer.is_decayed(make_tree(0)) == {
        "blocks": {"up": {"kernel": True, "bias": False}},
        "final_norm": {"scale": False},
        "head": {"kernel": True},
    }


def test_adamw_with_clipping_equals_numpy():
    optim = OptimConfig(
        learning_rate=0.1, schedule="constant", weight_decay=0.2, grad_clip_norm=1.0
    )
    rule = optimizer.build(optim, num_steps=NUM_STEPS)
    params, grads = make_tree(0), make_tree(1)

    updates, _ = rule.update(grads, rule.init(params), params)

    norm = math.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))

    def expected(grad, param, is_decayed):
        clipped = np.asarray(grad) / norm
        # After one step the moments are those of the gradient itself.
        adam = clipped / (np.abs(clipped) + optim.epsilon)
        return -0.1 * (adam + (0.2 * np.asarray(param) if is_decayed else 0))

    wanted = jax.tree.map(expected, grads, params, optimizer.is_decayed(params))
    jax.tree.map(
        lambda found, want: np.testing.assert_allclose(found, want, rtol=5e-5),
        updates,
        wanted,
    )


def test_lamb_scales_each_layer_of_the_stack_on_its_own():
    optim = OptimConfig(name="lamb", schedule="constant")
    rule = optimizer.build(optim, num_steps=NUM_STEPS)
    params, grads = make_tree(0), make_tree(1)

    updates, _ = rule.update(grads, rule.init(params), params)

    one_layer = jax.tree.map(lambda x: x[1], (params["blocks"], grads["blocks"]))
    alone = [{"blocks": jax.tree.map(lambda x: x[None], tree)} for tree in one_layer]
    state = rule.init(alone[0])
    updates_alone, _ = rule.update(alone[1], state, alone[0])
    jax.tree.map(
        lambda found, want: np.testing.assert_allclose(found[1], want[0], rtol=1e-6),
        updates["blocks"],
        updates_alone["blocks"],
    )


def test_lamb_of_a_single_tree_is_that_of_optax():
    optim = OptimConfig(name="lamb", schedule="constant", weight_decay=0.1)
    # A stack of one layer is a single tree.
    params, grads = ({"blocks": {"kernel": jnp.ones((1, 4, 2)) * s}} for s in (3, 7))
    rule = optimizer.build(optim, num_steps=NUM_STEPS)
    theirs = optax.lamb(
        optim.learning_rate, *optim.betas, eps=optim.epsilon, weight_decay=0.1
    )

    found, _ = rule.update(grads, rule.init(params), params)
    wanted, _ = theirs.update(grads, theirs.init(params), params)

    jax.tree.map(
        lambda ours, want: np.testing.assert_allclose(ours, want, rtol=1e-5),
        found,
        wanted,
    )


def test_unclipped_gradients_are_left_alone():
    optim = OptimConfig(schedule="constant")
    clipped = dataclasses.replace(optim, grad_clip_norm=1e9)
    params, grads = make_tree(0), make_tree(1)

    found = [
        rule.update(grads, rule.init(params), params)[0]
        for rule in (optimizer.build(o, num_steps=NUM_STEPS) for o in (optim, clipped))
    ]

    jax.tree.map(np.testing.assert_array_equal, *found)
