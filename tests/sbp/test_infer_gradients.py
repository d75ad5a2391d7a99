"""Gradients through `sbp.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded import assert_equal, normal, place

import sbp
from sbp import broadcast, partial_sum, split
from sbp.signature import parse


@pytest.fixture(scope="module")
def line():
    """Two devices along one axis."""
    return sbp.placement("cpu", [0, 1], ("x",))


@pytest.fixture(scope="module")
def grid():
    """2 x 2 devices."""
    return sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))


COMPONENTS = ("P", "S(0)", "S(1)", "B")


@pytest.mark.parametrize("second", COMPONENTS)
@pytest.mark.parametrize("first", COMPONENTS)
def test_gradients_through_jit_have_the_dual_signature(first, second, line):
    x, w = normal(4, 6), normal(6, 8, seed=1)

    def loss(x, w):
        return jnp.sum(jnp.tanh(x @ w))

    placed = place(x, line, parse(first)), place(w, line, parse(second))
    grads = jax.jit(jax.grad(sbp.jit(loss), argnums=(0, 1)))(*placed)

    assert_equal(grads, jax.grad(loss, argnums=(0, 1))(x, w))
    # The gradient of a partial sum is the same for each addend: broadcast.
    dual = [(first, second)[i].replace("P", "B") for i in (0, 1)]
    assert [str(sbp.signature_of(g)[0]) for g in grads] == dual


def test_gradients_work_under_a_set_mesh_and_to_second_order(grid):
    x = normal(4, 6)
    placed = place(x, grid, (split(0), partial_sum))

    def square(x):
        return jnp.sum(jnp.sin(x) ** 2)

    def curvature(function):
        return lambda x: jnp.sum(jax.grad(function)(x) ** 2)

    with jax.set_mesh(grid.mesh):
        first = jax.grad(sbp.jit(square))(placed)
    second = jax.jit(jax.grad(sbp.jit(curvature(sbp.jit(square)))))(placed)

    assert_equal(first, jax.grad(square)(x))
    assert_equal(second, jax.grad(curvature(square))(x), rtol=1e-3)


def test_integer_arguments_and_results_have_no_gradient(line):
    x, index = normal(6, 4), np.array([1, 3], np.int32)

    def pick(x, index):
        return jnp.sum(x[index]), index + 1

    placed = place(x, line, (split(0),)), place(index, line, (broadcast,))
    grad, result = jax.jit(jax.grad(sbp.jit(pick), has_aux=True))(*placed)

    assert_equal(grad, jax.grad(pick, has_aux=True)(x, index)[0])
    assert_equal(result, index + 1)
