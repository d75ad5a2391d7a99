"""Random programs on random signatures give the dense values and collectives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sharded import place, value_of

import sbp

# Operations from values of shape (8, 8) to one of the same shape.
STEPS = {
    "add": lambda x, y: x + y,
    "argmax": lambda x, y: x + jnp.argmax(y, axis=1, keepdims=True),
    "bias": lambda x, y: x - y[3:4],
    "column": lambda x, y: x * y[:, 2:3],
    "concatenate": lambda x, y: jnp.concatenate([x[:4], y[4:]]),
    "cond": lambda x, y: lax.cond(jnp.sum(y) > 0, lambda x: x @ y, jnp.tanh, x),
    "cumsum": lambda x, y: jnp.cumsum(x, axis=1) / 8,
    "divide": lambda x, y: x / (2 + jnp.square(y)),
    "einsum": lambda x, y: jnp.einsum("abc,bd->ad", x.reshape(8, 4, 2), y[:4]) / 3,
    "embed": lambda x, y: jnp.take(x, jnp.argsort(y[0]), axis=0),
    "matmul": lambda x, y: x @ y / 3,
    "max": lambda x, y: x - jnp.max(y, axis=0, keepdims=True),
    "mean": lambda x, y: x * jnp.mean(y),
    "negative": lambda x, y: -x,
    "norm": lambda x, y: (x - jnp.mean(x, 1, keepdims=True))
    * lax.rsqrt(jnp.var(x, 1, keepdims=True) + 1),
    "pad": lambda x, y: jnp.pad(x[1:7, :], ((1, 1), (0, 0)), constant_values=2.0),
    "product": lambda x, y: x * y,
    "reshape": lambda x, y: x.reshape(2, 4, 8).transpose(1, 0, 2).reshape(8, 8) + y,
    "scan": lambda x, y: lax.scan(lambda c, r: (jnp.tanh(c + r), c @ y), x[0], y)[1],
    "scatter": lambda x, y: x.at[jnp.array([1, 5, 1])].add(y[:3]),
    "softmax": lambda x, y: jax.nn.softmax(x, axis=0) + y,
    "sort": lambda x, y: jnp.sort(x, axis=0),
    "sums": lambda x, y: jnp.sum(x, 0, keepdims=True) + jnp.sum(y, 1, keepdims=True),
    "tanh": lambda x, y: jnp.tanh(x),
    "transpose": lambda x, y: x.T,
    "where": lambda x, y: jnp.where(x > 0, x, y),
}  # fmt: skip

COMPONENTS = (sbp.split(0), sbp.split(1), sbp.broadcast, sbp.partial_sum)
SIGNATURES = list(itertools.product(COMPONENTS, COMPONENTS))


def draw(seed):
    """Returns the names of a program, a function that runs it, and signatures."""
    rng = np.random.default_rng(seed)
    names = rng.choice(list(STEPS), 6).tolist()
    reads = [rng.integers(0, i + 3, 2).tolist() for i in range(len(names))]

    def program(*inputs):
        values = list(inputs)
        for name, (a, b) in zip(names, reads, strict=True):
            values.append(STEPS[name](values[a], values[b]))
        return values[-1], jnp.sum(values[-2])

    chosen = [SIGNATURES[i] for i in rng.integers(0, len(SIGNATURES), 3)]
    return names, program, chosen


def check(seed):
    grid = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
    names, program, signatures = draw(seed)
    values = [
        np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32)
        for i in range(3)
    ]
    placed = [place(v, grid, s) for v, s in zip(values, signatures, strict=True)]

    def loss(*inputs):
        return jnp.sum(jnp.sin(program(*inputs)[0]))

    both = sbp.jit(lambda *xs: (program(*xs), jax.grad(loss)(*xs)))
    results = jax.tree.leaves(both(*placed))
    arrays = [jnp.asarray(value) for value in values]
    dense = jax.tree.leaves((program(*arrays), jax.grad(loss)(*arrays)))
    for own, other in zip(results, dense, strict=True):
        value = value_of(own, grid, sbp.signature_of(own))
        np.testing.assert_allclose(
            value, other, rtol=2e-3, atol=2e-3, err_msg=f"{names} on {signatures}"
        )


@pytest.mark.parametrize("seed", range(6))
def test_random_program(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 300, 50))
def test_many_random_programs(start):
    for seed in range(start, start + 50):
        check(seed)
