"""What a layer saves for its backward pass: activations, and nothing it is given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from sbp.pipeline.layers import Stack
from sbp.pipeline.region import ManualRegion

B, D, F = 5, 4, 6
WEIGHTS = {
    "up": jnp.ones((2, D, F)),
    "bias": jnp.zeros((2, F)),
    "scale": jnp.ones((2, D)),
    "down": jnp.ones((2, F, D)),
}


def block(weights, x_BD, mask_B, layer):
    h_BD = x_BD.astype(jnp.float32) * weights["scale"][None] * mask_B[:, None]
    h_BF = h_BD.astype(jnp.bfloat16) @ weights["up"].astype(jnp.bfloat16)
    h_BF = jnp.tanh(h_BF + weights["bias"].astype(jnp.bfloat16)[None])
    return x_BD + 0.5 * (h_BF @ weights["down"].astype(jnp.bfloat16))


def make_stack(wrap):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    return Stack(
        region=ManualRegion(mesh, ("data",)),
        block=wrap(block),
        weights=WEIGHTS,
        first=0,
        indices=jnp.arange(2),
        is_full=True,
    )


def keep_products(f):
    return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        # The input, which the scale's gradient needs, in its narrow form; what goes
        # into each product; and the derivative of tanh.
        (lambda f: f, {(D, "bfloat16"), (F, "bfloat16")}),
        (keep_products, {(D, "bfloat16"), (F, "bfloat16")}),
        (jax.checkpoint, {(D, "bfloat16")}),
    ],
    ids=["nothing_again", "products_kept", "everything_again"],
)
def test_no_weights_are_saved_nor_anything_that_is_given(wrap, expected):
    x_BD = jax.ShapeDtypeStruct((B, D), jnp.bfloat16)
    saved = make_stack(wrap).saved_shapes(x_BD, jnp.ones(B))
    assert {leaf.shape[0] for leaf in saved} == {B}
    assert {(leaf.shape[1], leaf.dtype.name) for leaf in saved} == expected


@pytest.mark.parametrize("wrap", [lambda f: f, keep_products, jax.checkpoint])
def test_gradients_are_those_of_the_layers_one_after_another(wrap):
    stack, mask_B = make_stack(wrap), jnp.arange(1.0, B + 1)
    x_BD = jnp.linspace(-1, 1, B * D, dtype=jnp.bfloat16).reshape(B, D)
    shapes = stack.saved_shapes(x_BD, mask_B)
    saved = [jnp.zeros((1, 2, *leaf.shape), leaf.dtype) for leaf in shapes]
    y_BD, saved = jax.jit(stack.forward)(x_BD, mask_B, saved, 0)
    sums = jax.tree.map(jnp.ones_like, WEIGHTS)
    backward = jax.jit(stack.backward)
    grad_x, grads = backward(jnp.ones_like(y_BD), mask_B, saved, 0, sums)

    def run(weights, x_BD):
        for layer in range(2):
            own = jax.tree.map(lambda leaf: leaf[layer], weights)  # noqa: B023 - used at once
            x_BD = block(own, x_BD, mask_B, layer)
        return x_BD

    expected_y, vjp = jax.vjp(run, WEIGHTS, x_BD)
    expected, expected_x = vjp(jnp.ones_like(y_BD))
    found = (y_BD, grad_x, jax.tree.map(lambda total: total - 1, grads))
    for ours, theirs in zip(
        *map(jax.tree.leaves, (found, (expected_y, expected_x, expected))), strict=True
    ):
        np.testing.assert_allclose(
            ours.astype(np.float32), theirs.astype(np.float32), rtol=0.03, atol=0.03
        )
