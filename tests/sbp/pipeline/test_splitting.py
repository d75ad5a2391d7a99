"""A backward pass cut in two gives the same gradients, and really is cut."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

from sbp.pipeline.splitting import CHEAP, PRODUCTS, Split

B, D, F = 3, 4, 8


def layer(weights, x, scale, down_dtype=jnp.float32):
    h = jax.nn.gelu(x @ weights["up"] + weights["bias"][None])
    y = h.astype(down_dtype) @ weights["down"].astype(down_dtype)
    return x + scale * jnp.tanh(y.astype(x.dtype)) * weights["gain"][None]


def make_arguments():
    keys = jax.random.split(jax.random.key(0), 6)
    weights = {
        "up": jax.random.normal(keys[0], (D, F)),
        "bias": jax.random.normal(keys[1], (F,)),
        "down": jax.random.normal(keys[2], (F, D)),
        "gain": jax.random.normal(keys[3], (D,)),
    }
    x, cotangent = jax.random.normal(keys[4], (2, B, D))
    return (weights, jnp.float32(0.5)), (x, cotangent)


def make_backward(block):
    def backward(given, passing):
        weights, scale = given
        x, cotangent = passing
        _, vjp = jax.vjp(lambda w, x: block(w, x, scale), weights, x)
        grad_weights, grad_x = vjp(cotangent)
        return grad_x, grad_weights

    return backward


def count_primitives(function, *arguments):
    """How often each primitive occurs among the equations that the results need."""
    jaxpr = jax.make_jaxpr(jax.jit(function))(*arguments).jaxpr
    counts = collections.Counter()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr")
            if inner is None:
                counts[eqn.primitive.name] += 1
            else:
                visit(getattr(inner, "jaxpr", inner))

    visit(jaxpr)
    return counts


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "remat", "jit"]
)
def test_both_parts_together_give_the_gradients(wrap):
    given, passing = make_arguments()
    split = Split(make_backward(wrap(layer)), PRODUCTS)
    grad_x, aside = jax.jit(split.first)(given, passing)
    unused = jax.tree.map(jnp.zeros_like, passing)
    grad_weights = jax.jit(split.later)(given, unused, aside)
    expected = jax.jit(make_backward(wrap(layer)))(given, passing)
    found = (grad_x, grad_weights)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert jnp.abs(ours - wanted).max() < 2e-6 * jnp.abs(wanted).max()


def test_products_for_weights_are_left_for_later_and_nothing_else():
    given, passing = make_arguments()
    split = Split(make_backward(jax.checkpoint(layer)), PRODUCTS)
    _, aside = split.first(given, passing)
    first = count_primitives(split.first, given, passing)
    later = count_primitives(split.later, given, passing, aside)
    # Forward again: two. Backward: two for the input, and two for the weights.
    assert first["dot_general"] == 4
    assert later["dot_general"] == 2
    assert set(later) <= {"dot_general", *CHEAP}


def test_operands_of_products_are_put_aside_in_their_narrow_form():
    given, passing = make_arguments()
    narrow = functools.partial(layer, down_dtype=jnp.bfloat16)
    _, aside = Split(make_backward(narrow), PRODUCTS).first(given, passing)
    kept = sorted((leaf.shape, leaf.dtype.name) for leaf in aside)
    assert kept == sorted(
        [
            ((D,), "float32"),  # gain: its gradient
            ((F,), "float32"),  # bias: its gradient
            ((B, D), "float32"),  # up: the input,
            ((B, F), "float32"),  # and the cotangent of its output
            ((B, F), "bfloat16"),  # down: the input,
            ((B, D), "bfloat16"),  # and the cotangent of its output
        ]
    )


def test_a_gradient_that_is_no_product_is_computed_first():
    def backward(given, passing):
        return 2 * passing, (given * passing).sum()

    given, passing = jnp.arange(3.0), jnp.ones(3)
    first, aside = Split(backward, PRODUCTS).first(given, passing)
    assert [leaf.shape for leaf in aside] == [()]
    assert Split(backward, PRODUCTS).later(given, passing, aside) == 3.0
    assert first.tolist() == [2.0, 2.0, 2.0]


def test_a_given_argument_is_not_put_aside():
    def backward(given, passing):
        return passing, given.T @ given

    given, passing = jnp.ones((2, 3)), jnp.ones(3)
    _, aside = Split(backward, PRODUCTS).first(given, passing)
    assert aside == []
    assert (
        Split(backward, PRODUCTS).later(given, passing, aside).tolist()
        == [[2.0] * 3] * 3
    )


def test_products_inside_a_loop_that_both_need_stay_together():
    def backward(given, passing):
        def step(x, w):
            return x @ w, x.T @ x

        x, products = jax.lax.scan(step, passing, given)
        return x, products

    given, passing = jnp.ones((2, 3, 3)), jnp.ones((3, 3))
    first, aside = Split(backward, PRODUCTS).first(given, passing)
    later = Split(backward, PRODUCTS).later(given, passing, aside)
    expected = backward(given, passing)
    assert jnp.array_equal(first, expected[0])
    assert jnp.array_equal(later, expected[1])


def test_frozen_weights_are_not_kept():
    (weights, scale), (x, _) = make_arguments()

    def forward(given, x):
        weights, scale = given
        frozen = jax.lax.stop_gradient(weights)
        y, vjp = jax.vjp(lambda x: layer(frozen, x, scale), x)
        return y, jax.tree.leaves(vjp)

    _, kept = Split(forward).first((weights, scale), x)

    assert kept
    assert all(leaf.shape[0] == B for leaf in kept)
