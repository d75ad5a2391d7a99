"""Operators on global tensors: values and deduced signatures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded import place, value_of

import sbp
from sbp.signature import parse


@pytest.fixture(scope="module")
def line():
    return sbp.placement("cpu", [0, 1], ("x",))


@pytest.fixture(scope="module")
def grid():
    return sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, Y, W, V = normal(4, 6), normal(4, 6, seed=1), normal(6, 8), normal(6)
TOKENS = np.array([[3, 0], [2, 1]], np.int32)


def layer_norm(x, scale, bias):
    centered = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return centered / deviation * scale + bias


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


# Operator, operands with their components, component of the result, and the same
# in NumPy. The operands are on two devices.
CASES = [
    (sbp.add, [(X, "S(0)"), (Y, "B")], "S(0)", np.add),
    (sbp.add, [(X, "P"), (Y, "B")], "P", np.add),
    (sbp.subtract, [(X, "P"), (Y, "P")], "P", np.subtract),
    (sbp.multiply, [(X, "P"), (Y, "B")], "P", np.multiply),
    (sbp.multiply, [(X, "P"), (2.5, None)], "P", np.multiply),
    (sbp.divide, [(X, "P"), (Y, "B")], "P", np.divide),
    (sbp.divide, [(X, "B"), (Y, "P")], "B", np.divide),
    (sbp.negative, [(X, "P")], "P", np.negative),
    (sbp.matmul, [(X, "S(1)"), (W, "S(0)")], "P", np.matmul),
    (sbp.matmul, [(X, "B"), (W, "S(1)")], "S(1)", np.matmul),
    (lambda x, w: sbp.einsum("ij,jk->ki", x, w), [(X, "B"), (W, "S(1)")], "S(0)",
     lambda x, w: (x @ w).T),
    (lambda x: sbp.einsum("ij->j", x), [(X, "S(0)")], "P", lambda x: x.sum(0)),
    (sbp.sum, [(X, "S(1)")], "P", np.sum),
    (lambda x: sbp.sum(x, 0, keepdims=True), [(X, "S(1)")], "S(1)",
     lambda x: x.sum(0, keepdims=True)),
    (lambda x: sbp.mean(x, (0, 1)), [(X, "P")], "P", np.mean),
    (lambda x: sbp.max(x, 1), [(X, "S(1)")], "B", lambda x: x.max(1)),
    (lambda x: sbp.min(x, 1), [(X, "S(0)")], "S(0)", lambda x: x.min(1)),
    (sbp.exp, [(X, "P")], "B", np.exp),
    (sbp.relu, [(X, "S(1)")], "S(1)", lambda x: np.maximum(x, 0)),
    (sbp.gelu, [(X, "S(0)")], "S(0)", gelu),
    (sbp.tanh, [(X, "B")], "B", np.tanh),
    (sbp.softmax, [(X, "S(1)")], "S(1)", softmax),
    (sbp.softmax, [(X, "S(0)")], "S(0)", softmax),
    (sbp.log_softmax, [(X, "S(1)")], "S(1)", lambda x: np.log(softmax(x))),
    (sbp.layer_norm, [(X, "S(0)"), (V, "B"), (V, "B")], "S(0)", layer_norm),
    (sbp.layer_norm, [(X, "S(1)"), (V, "S(0)"), (V, "B")], "S(1)", layer_norm),
    (sbp.layer_norm, [(X, "P"), (V, "B"), (V, "B")], "B", layer_norm),
    (sbp.embedding, [(X, "S(0)"), (TOKENS, "B")], "P", lambda t, i: t[i]),
    (sbp.embedding, [(X, "S(1)"), (TOKENS, "B")], "S(2)", lambda t, i: t[i]),
    (sbp.embedding, [(X, "B"), (TOKENS, "S(0)")], "S(0)", lambda t, i: t[i]),
    (lambda x: sbp.reshape(x, (2, 2, -1)), [(X, "S(0)")], "S(0)",
     lambda x: x.reshape(2, 2, -1)),
    (lambda x: sbp.reshape(x, 24), [(X, "P")], "P", np.ravel),
    (sbp.transpose, [(X, "S(0)")], "S(1)", np.transpose),
    (lambda x: sbp.transpose(x, (0, 1)), [(X, "P")], "P", lambda x: x),
    (lambda x: sbp.squeeze(sbp.expand_dims(x, 0), 0), [(X, "P")], "P", lambda x: x),
    (lambda x: sbp.expand_dims(x, (0, -1)), [(X, "S(1)")], "S(2)",
     lambda x: x[None, ..., None]),
    (lambda x, y: sbp.concatenate([x, y], axis=1), [(X, "S(0)"), (Y, "B")], "S(0)",
     lambda x, y: np.concatenate([x, y], 1)),
    (lambda x, y: sbp.concatenate([x, y]), [(X, "P"), (Y, "B")], "P",
     lambda x, y: np.concatenate([x, y])),
    (lambda x: sbp.getitem(x, np.s_[:, 1:5:2]), [(X, "S(0)")], "S(0)",
     lambda x: x[:, 1:5:2]),
    (lambda x: sbp.getitem(x, (..., -1)), [(X, "P")], "P", lambda x: x[..., -1]),
    (lambda x: sbp.getitem(x, 2), [(X, "S(1)")], "S(0)", lambda x: x[2]),
    (sbp.where, [(X > 0, "B"), (X, "P"), (Y, "B")], "P", np.where),
    (lambda x: sbp.astype(x, "float16"), [(X, "P")], "P", lambda x: x),
    (lambda x: sbp.astype(x, "int32"), [(X, "P")], "B", lambda x: x.astype(int)),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "operands", "component", "dense"), CASES)
def test_operator_gives_the_dense_value_and_the_deduced_signature(
    operator, operands, component, dense, line
):
    placed = [
        value if given is None else place(value, line, parse(given), seed=7)
        for value, given in operands
    ]

    result = operator(*placed)

    assert sbp.signature_of(result) == parse(component)
    np.testing.assert_allclose(
        value_of(result, line, parse(component)),
        dense(*(value for value, _ in operands)),
        rtol=5e-3 if result.dtype == jnp.float16 else 1e-4,
        atol=2e-3 if result.dtype == jnp.float16 else 1e-5,
    )


def test_signatures_are_deduced_on_each_axis(grid):
    x, w = place(X, grid, parse("B,S(0)")), place(W, grid, parse("S(1),B"))

    y = sbp.matmul(x, w)

    assert str(jax.typeof(y)) == "float32[4@tensor,8@data]"
    np.testing.assert_allclose(value_of(y, grid, parse("S(1),S(0)")), X @ W, rtol=1e-5)
    local = {s.device: s.data.shape for s in y.addressable_shards}
    assert set(local.values()) == {(2, 4)}


def test_a_column_then_row_mlp_by_hand(grid):
    w2 = normal(8, 6, seed=3)
    x = place(X, grid, parse("S(0),B"))
    up, down = place(W, grid, parse("B,S(1)")), place(w2, grid, parse("B,S(0)"))

    h = sbp.gelu(sbp.matmul(x, up))
    y = sbp.matmul(h, down)
    z = sbp.to_global(y, sbp={"data": sbp.split(0)})

    assert str(jax.typeof(h)) == "float32[4@data,8@tensor]"
    assert str(jax.typeof(y)) == "float32[4@data,6]{U:tensor}"
    assert str(jax.typeof(z)) == "float32[4@data,6]"
    np.testing.assert_allclose(np.asarray(z), gelu(X @ W) @ w2, rtol=1e-3, atol=1e-5)


def test_gradients_of_chained_operators_are_the_dense_ones(line):
    def loss(x, w):
        return sbp.sum(sbp.exp(sbp.negative(sbp.matmul(x, w))))

    placed = place(X, line, parse("S(1)")), place(W, line, parse("S(0)"))
    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(*placed)
    dense = jax.grad(lambda x, w: jnp.sum(jnp.exp(-(x @ w))), argnums=(0, 1))(X, W)

    for grad, other, component in zip(grads, dense, ("S(1)", "S(0)"), strict=True):
        assert sbp.signature_of(grad) == parse(component)
        np.testing.assert_allclose(
            value_of(grad, line, parse(component)), other, rtol=1e-4
        )


def test_operators_work_inside_jit(line):
    x = place(X, line, parse("P"))

    doubled = jax.jit(lambda x: sbp.add(x, x))(x)

    assert sbp.signature_of(doubled) == parse("P")
    np.testing.assert_allclose(value_of(doubled, line, parse("P")), 2 * X, rtol=1e-5)


def test_shapes_that_do_not_fit_are_the_error_of_the_plain_function(line):
    with pytest.raises(TypeError, match="contracting dimensions"):
        sbp.matmul(place(X, line, parse("B")), place(Y, line, parse("B")))


def test_operands_on_no_placement_are_an_error():
    with pytest.raises(ValueError, match=r"sbp.jit\(add\) got no global tensor among"):
        sbp.add(X, Y)
