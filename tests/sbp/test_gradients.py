"""Derivatives of conversions are those of the dense computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.sbp import hlo, numpy_model
from tests.sbp.conversion import make, to_signature

SQUARE = sbp.placement("cpu", [[0, 1], [2, 3]])
LINE = sbp.placement("cpu", [0, 1])
VALUE = np.arange(16.0, dtype=np.float32).reshape(4, 4)
WEIGHT = (VALUE % 5) - 2


def loss_after(placement, signature):
    """A loss whose gradient is ``2 * VALUE * WEIGHT``, behind a conversion."""

    def loss(x):
        y = sbp.to_global(x, placement, signature)
        y = sbp.to_global(y, sbp=(sbp.broadcast,) * len(placement.shape))
        return (y * y * sbp.to_global(WEIGHT, placement, sbp.signature_of(y))).sum()

    return loss


GRADIENT = 2 * VALUE * WEIGHT
PAIRS = [
    (("S0", "S1"), ("S1", "S0")),
    (("S0", "P"), ("B", "S0")),
    (("P", "P"), ("S0", "S1")),
    (("B", "B"), ("P", "S1")),
    (("P", "B"), ("B", "P")),
    (("S0", "S0"), ("B", "S0")),
]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_gradient_has_the_dual_signature_and_the_dense_value(source, target):
    x = make(VALUE, SQUARE, source, np.random.default_rng(0))
    gradient = jax.jit(jax.grad(loss_after(SQUARE, to_signature(target))))(x)
    dual = tuple(component if component != "P" else "B" for component in source)
    assert sbp.signature_of(gradient) == to_signature(dual)
    np.testing.assert_array_equal(sbp.full_value(gradient), GRADIENT)


@pytest.mark.slow
@pytest.mark.parametrize("source", numpy_model.signatures(2), ids="-".join)
def test_gradients_of_all_pairs(source):
    x = make(VALUE, SQUARE, source, np.random.default_rng(0))
    for target in numpy_model.signatures(2):
        gradient = jax.jit(jax.grad(loss_after(SQUARE, to_signature(target))))(x)
        np.testing.assert_array_equal(sbp.full_value(gradient), GRADIENT)


def test_gradient_of_a_sum_of_addends_needs_no_communication_to_each_addend():
    """Each addend's gradient is the whole gradient: partial sum and broadcast."""
    x = sbp.to_global(VALUE, LINE, sbp.partial_sum)

    def loss(x):
        return (2 * sbp.to_global(x, sbp=sbp.broadcast)).sum()

    with jax.set_mesh(LINE.mesh):  # the gradient of a linear loss depends on nothing
        program = jax.jit(jax.grad(loss)).lower(x).compile()
    assert hlo.collectives(program.as_text()) == []
    assert (sbp.full_value(program(x)) == 2).all()


def test_gradient_of_an_all_gather_is_a_slice():
    x = sbp.to_global(VALUE, LINE, sbp.split(0))
    gradient = jax.jit(jax.grad(loss_after(LINE, sbp.broadcast)))
    text = gradient.lower(x).compile().as_text()
    assert [name for name, _ in hlo.collectives(text)] == ["all-gather"]


def test_gradient_comes_back_from_another_placement():
    x = sbp.to_global(VALUE, SQUARE, sbp.parse("S(0),P"))
    elsewhere = sbp.placement("cpu", [7, 5])
    with jax.set_mesh(elsewhere.mesh):  # the seed of the gradient lives there
        gradient = jax.grad(loss_after(elsewhere, sbp.split(1)))(x)
    assert sbp.placement_of(gradient) == SQUARE
    assert sbp.signature_of(gradient) == sbp.parse("S(0),B")
    np.testing.assert_array_equal(sbp.full_value(gradient), GRADIENT)


def test_gradient_comes_back_from_another_mesh_inside_jit():
    line = sbp.placement("cpu", [0, 1, 2, 3])
    x = sbp.to_global(VALUE, SQUARE, sbp.parse("S(0),P"))
    gradient = jax.jit(jax.grad(loss_after(line, sbp.split(1))))(x)
    assert sbp.placement_of(gradient) == SQUARE
    np.testing.assert_array_equal(sbp.full_value(gradient), GRADIENT)


def test_gradient_of_a_plain_value():
    gradient = jax.jit(jax.grad(loss_after(LINE, sbp.split(0))))(VALUE)
    np.testing.assert_array_equal(np.asarray(gradient), GRADIENT)


def test_grad_sbp_is_where_the_gradient_passes_through():
    x = sbp.to_global(VALUE, LINE, sbp.split(0))

    def loss(x, grad_sbp):
        y = sbp.to_global(x, sbp=sbp.split(1), grad_sbp=grad_sbp)
        return (y * y).sum()

    def collectives(grad_sbp):
        gradient = jax.jit(jax.grad(lambda x: loss(x, grad_sbp)))
        np.testing.assert_array_equal(gradient(x), 2 * VALUE)
        text = gradient.lower(x).compile().as_text()
        return [name for name, _ in hlo.collectives(text)]

    assert collectives(None) == ["all-to-all", "all-to-all"]
    assert collectives(sbp.broadcast) == ["all-to-all", "all-gather"]


def test_forward_mode_and_second_derivatives():
    x = sbp.to_global(VALUE, LINE, sbp.split(0))

    def cube(x):
        return sbp.to_global(x, sbp=sbp.split(1)) ** 3

    y, tangent = jax.jit(lambda x: jax.jvp(cube, (x,), (jnp.ones_like(x),)))(x)
    assert sbp.signature_of(tangent) == (sbp.split(1),)
    np.testing.assert_array_equal(tangent, 3 * VALUE**2)

    def slope_sum(x):
        return jax.grad(lambda x: cube(x).sum())(x).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(slope_sum))(x), 6 * VALUE)


def test_rematerialized_conversions_have_the_same_gradient():
    x = sbp.to_global(VALUE, LINE, sbp.split(0))
    loss = jax.checkpoint(loss_after(LINE, sbp.split(1)))
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), GRADIENT)


def test_gradients_of_shards_follow_the_dual_rule():
    """Parts for parts, addends for replicas, the whole for each addend."""

    def gradients(signature, shards):
        def loss(shards):
            x = sbp.from_local(shards, LINE, sbp.parse(signature))
            return (sbp.to_global(x, sbp=sbp.broadcast) ** 2).sum()

        with jax.set_mesh(LINE.mesh):
            found = jax.grad(loss)({0: jnp.array(shards[0]), 1: jnp.array(shards[1])})
        return [found[rank].tolist() for rank in (0, 1)]

    assert gradients("S(0)", [[1.0, 2.0], [3.0, 4.0]]) == [[2, 4], [6, 8]]
    assert gradients("P", [[1.0, 2.0], [3.0, 4.0]]) == [[8, 12], [8, 12]]
    assert np.sum(gradients("B", [[1.0, 2.0]] * 2), axis=0).tolist() == [2, 4]
