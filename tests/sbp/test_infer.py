"""`sbp.jit`: what it takes and gives, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from flax import nnx
from sharded import assert_equal, normal, place

import sbp
from sbp import broadcast, partial_sum, split
from sbp.infer import FallbackWarning


@pytest.fixture(scope="module")
def line():
    """Two devices along one axis."""
    return sbp.placement("cpu", [0, 1], ("x",))


@pytest.fixture(scope="module")
def grid():
    """2 x 2 devices."""
    return sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))


def test_three_axes_and_an_axis_of_one_device():
    cube = sbp.placement("cpu", np.arange(8).reshape(2, 2, 2), ("a", "b", "c"))
    flat = sbp.placement("cpu", [[0], [1]], ("a", "b"))
    x, w = normal(8, 12), normal(12, 4)

    def product(x, w):
        return jax.nn.softmax(x @ w)

    y = sbp.jit(product)(
        place(x, cube, (split(0), split(1), partial_sum)),
        place(w, cube, (broadcast, split(0), split(1))),
    )
    z = sbp.jit(product)(
        place(x, flat, (split(0), partial_sum)), place(w, flat, (partial_sum, split(1)))
    )

    assert_equal(y, product(x, w))
    assert_equal(z, product(x, w))


def test_results_get_the_signatures_asked_for(grid):
    x = normal(4, 6)
    placed = place(x, grid, (split(0), split(1)))

    def sums(x):
        return {"rows": jnp.sum(x, 1), "both": (x @ x.T, x)}

    kept = sbp.jit(sums, partial_outputs="keep")(placed)
    asked = sbp.jit(sums, out_sbp={"rows": None, "both": {"tensor": split(0)}})(placed)

    assert sbp.signature_of(kept["rows"]) == (split(0), partial_sum)
    assert sbp.signature_of(asked["rows"]) == (split(0), broadcast)
    assert [sbp.signature_of(y) for y in asked["both"]] == [(broadcast, split(0))] * 2
    assert_equal(kept, sums(x))
    assert_equal(asked, sums(x))


def test_a_partial_sum_asked_to_be_split_is_reduce_scattered(line):
    x, w = normal(4, 6), normal(6, 8)
    placed = place(x, line, (split(1),)), place(w, line, (split(0),))
    jitted = sbp.jit(jnp.matmul, out_sbp=split(1))

    assert programs.compiled_collectives(jitted.lower(*placed)) == {"reduce-scatter": 1}
    assert_equal(jitted(*placed), x @ w)


def test_constrain_pins_an_intermediate(grid):
    x = normal(4, 8)
    placed = place(x, grid, (split(0), broadcast))

    def function(x):
        y = sbp.constrain(jnp.tanh(x), {"tensor": split(1)})
        return jnp.exp(y)

    y = sbp.jit(function)(placed)

    assert sbp.signature_of(y) == (broadcast, split(1))
    assert_equal(y, function(x))


def test_jit_inside_jit_is_deduced_by_the_outer_one(line):
    x, w = normal(4, 6), normal(6, 8)
    placed = place(x, line, (split(1),)), place(w, line, (split(0),))
    inner = sbp.jit(jnp.matmul)  # on its own it would add up

    def outer(x, w):
        return inner(x, w) + sbp.matmul(x, w)

    assert sbp.explain(outer, *placed).collectives == {"all-reduce": 1}
    assert_equal(sbp.jit(outer)(*placed), 2 * (x @ w))


def test_a_flax_module_can_be_an_argument(line):
    linear = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    x = normal(4, 6)

    y = sbp.jit(lambda linear, x: linear(x))(linear, place(x, line, (split(0),)))

    assert sbp.signature_of(y) == (split(0),)
    assert_equal(y, linear(x))


def test_arrays_on_a_mesh_of_auto_axes_are_global_tensors(line):
    mesh = line.mesh_with(jax.sharding.AxisType.Auto)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(normal(4, 6), sharding)

    y = sbp.add(x, place(normal(4, 6), line, (broadcast,)))

    assert sbp.signature_of(y) == (split(0),)
    assert_equal(y, 2 * normal(4, 6))


def test_where_the_compiler_chooses_the_plain_function_runs():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(
        normal(4, 6), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )

    y = jax.jit(lambda x: sbp.matmul(x, x.T))(x)

    np.testing.assert_allclose(y, normal(4, 6) @ normal(4, 6).T, rtol=1e-5)


def test_a_traced_function_may_close_over_a_global_tensor(line):
    x, w = normal(4, 6), normal(6, 8)
    weight = place(w, line, (split(1),))

    y = jax.jit(lambda x: sbp.matmul(x, weight))(place(x, line, (broadcast,)))

    assert sbp.signature_of(y) == (split(1),)
    assert_equal(y, x @ w)


def test_static_and_keyword_arguments(line):
    x = normal(4, 6)
    scale = sbp.jit(lambda x, *, by, kind: x * by if kind == "mul" else x / by,
                    static_argnames=("kind",))  # fmt: skip
    placed = place(x, line, (split(0),))

    assert_equal(scale(placed, by=2.0, kind="mul"), x * 2)
    assert_equal(scale(placed, by=2.0, kind="div"), x / 2)


def test_an_operation_without_rules_warns_that_it_gathers(line):
    x = np.eye(4, dtype=np.float32) * 4

    with pytest.warns(FallbackWarning, match="computes cholesky on every device"):
        y = sbp.jit(jnp.linalg.cholesky)(place(x, line, (split(0),)))
    assert_equal(y, np.linalg.cholesky(x))
    # Nothing to say where nothing is gathered.
    assert_equal(sbp.jit(jnp.linalg.cholesky)(place(x, line, (broadcast,))), y)


def test_low_precision_and_integers_keep_their_dtype(line):
    x = normal(4, 8).astype(jnp.bfloat16)
    n = np.arange(32, dtype=np.int8).reshape(4, 8)
    y = sbp.jit(lambda x: x.astype(jnp.float32).sum(1))(place(x, line, (split(1),)))
    z = sbp.jit(lambda n: n.sum(0, dtype=jnp.int8) // 2)(place(n, line, (partial_sum,)))

    assert_equal(y, np.asarray(x, np.float32).sum(1), rtol=1e-2)
    assert_equal(z, n.sum(0, dtype=np.int8) // 2)


def test_no_global_tensor_is_an_error():
    with pytest.raises(ValueError, match=r"sbp.jit\(tanh\) got no global tensor among "
                       r"its 1 arguments.*sbp.to_global"):  # fmt: skip
        sbp.jit(jnp.tanh)(np.ones(4))


def test_two_placements_are_an_error(line):
    other = sbp.placement("cpu", [2, 3], ("x",))
    x = np.ones(4, np.float32)

    with pytest.raises(ValueError, match=r"two placements, .*\[0, 1\].*\[2, 3\]"):
        sbp.add(place(x, line, (split(0),)), place(x, other, (split(0),)))


def test_a_global_tensor_closed_over_is_an_error(line):
    closed = place(np.ones(4, np.float32), line, (split(0),))

    with pytest.raises(ValueError, match="closes over a global tensor.*argument"):
        sbp.jit(lambda x: jnp.sum(closed) + x)(closed)


def test_out_sbp_that_does_not_fit_is_an_error(line):
    x = place(np.ones((4, 5), np.float32), line, (split(0),))

    with pytest.raises(ValueError, match="names a dim that a tensor of 2 dims"):
        sbp.jit(jnp.tanh, out_sbp=split(2))(x)
    with pytest.raises(ValueError, match="is no prefix of the results"):
        sbp.jit(jnp.tanh, out_sbp=(split(0), split(0), None))(x)
    with pytest.raises(ValueError, match="5 is not divisible by 2"):
        sbp.jit(jnp.tanh, out_sbp=sbp.split(1))(x)
