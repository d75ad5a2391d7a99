"""`sbp.jit`: deduced signatures, values, gradients and collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax
from sharded import place, value_of

import sbp
from sbp.infer import FallbackWarning, Jitted
from sbp.signature import parse

S0, S1, B, P = sbp.split(0), sbp.split(1), sbp.broadcast, sbp.partial_sum


@pytest.fixture(scope="module")
def line():
    """Two devices along one axis."""
    return sbp.placement("cpu", [0, 1], ("x",))


@pytest.fixture(scope="module")
def grid():
    """2 x 2 devices."""
    return sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_equal(x, dense, rtol=1e-4):
    """Asserts that a tree of global tensors holds the dense values."""

    def check(own, other):
        value = value_of(own, sbp.placement_of(own), sbp.signature_of(own))
        np.testing.assert_allclose(value, other, rtol=rtol, atol=1e-4)

    jax.tree.map(check, x, dense)


def deduced(function, placement, *operands):
    """Returns how the last operation takes its operands, and what it gives.

    Operands are pairs of a shape and a component.
    """
    structs = [
        programs.struct(shape, placement, (component,)) for shape, component in operands
    ]
    jitted = Jitted(function, partial_outputs="keep")
    last = jitted.compile(*structs).program.instructions[-1]
    return [str(s[0]) for s in last.inputs], str(last.outputs[0][0])


# Product (4, 6) @ (6, 8) on two devices: components of the operands as given, as
# converted, and of the result. These are also OneFlow's.
MATMUL = """
    S(0) S(0) : S(1) S(0) -> P      S(0) S(1) : B    S(1) -> S(1)
    S(0) B    : S(0) B    -> S(0)   S(0) P    : B    P    -> P
    S(1) S(0) : S(1) S(0) -> P      S(1) S(1) : B    S(1) -> S(1)
    S(1) B    : S(0) B    -> S(0)   S(1) P    : B    P    -> P
    B    S(0) : B    S(1) -> S(1)   B    S(1) : B    S(1) -> S(1)
    B    B    : B    B    -> B      B    P    : B    P    -> P
    P    S(0) : S(1) S(0) -> P      P    S(1) : B    S(1) -> S(1)
    P    B    : P    B    -> P      P    P    : B    P    -> P
"""

# (4, 4) with (4, 4), where OneFlow does the same.
ARITHMETIC = """
    add : S(0) S(1) : S(0) S(0) -> S(0)   add : S(0) P    : S(0) S(0) -> S(0)
    add : P    P    : P    P    -> P      mul : P    B    : P    B    -> P
    mul : P    S(0) : S(0) S(0) -> S(0)
    div : P    B    : P    B    -> P      div : B    P    : B    B    -> B
    div : P    P    : P    B    -> P
"""

# Where we do better. Slicing is free: OneFlow gathers the split operand, or adds up
# the partial one. Differences of partial sums are partial. Of two equal factors in
# parts either may be added up.
BETTER = """
    mul : P    P    : P    B    -> P
    add : S(0) B    : S(0) S(0) -> S(0)   add : B    P    : P    P    -> P
    sub : P    P    : P    P    -> P      sub : S(1) B    : S(1) S(1) -> S(1)
"""


def rows(text, num_fields):
    """Splits a table of several columns of rows into fields."""
    words = text.replace(":", " ").replace("->", " ").split()
    return [tuple(words[i : i + num_fields]) for i in range(0, len(words), num_fields)]


@pytest.mark.parametrize("row", rows(MATMUL, 5), ids=" ".join)
def test_matmul_converts_the_operand_that_is_cheapest_to_convert(row, line):
    a, b, *cast, result = row
    shapes = ((4, 6), parse(a)[0]), ((6, 8), parse(b)[0])
    assert deduced(jnp.matmul, line, *shapes) == (cast, result)


def test_matmul_weighs_sizes(line):
    def result(m):
        return deduced(jnp.matmul, line, ((m, 5 + 1), S0), ((6, 8), S0))

    assert result(100) == (["S(0)", "B"], "S(0)")
    assert result(4) == (["S(1)", "S(0)"], "P")


@pytest.mark.parametrize("row", rows(ARITHMETIC, 6) + rows(BETTER, 6), ids=" ".join)
def test_arithmetic_keeps_splits_and_partial_sums(row, line):
    name, a, b, *cast, result = row
    shapes = ((4, 4), parse(a)[0]), ((4, 4), parse(b)[0])
    assert deduced(getattr(lax, name), line, *shapes) == (cast, result)


@pytest.mark.parametrize(
    ("function", "component", "cast", "result"),
    [
        # OneFlow: S(0) on two devices. We do not split what nobody has split.
        (jnp.tanh, P, "B", "B"),
        (lambda x: jnp.sum(x, 0), S0, "S(0)", "P"),
        (lambda x: jnp.sum(x, 0), S1, "S(1)", "S(0)"),
        (lambda x: jnp.sum(x, 0), P, "P", "P"),
        (lambda x: jnp.sum(x, 1), S0, "S(0)", "S(0)"),
        (lambda x: jnp.sum(x, 1), S1, "S(1)", "P"),
        # OneFlow: an all-to-all or all-gather of all of x.
        (lambda x: jnp.max(x, 0), S0, "S(0)", "B"),
        (jnp.max, S0, "S(0)", "B"),
        (lambda x: lax.slice(x, (0, 0), (4, 2)), S0, "S(0)", "S(0)"),
        (lambda x: lax.slice(x, (0, 0), (4, 2)), P, "P", "P"),
        (lambda x: lax.neg(x), P, "P", "P"),
        (lambda x: lax.expand_dims(x, (1,)), P, "P", "P"),
        # Sorted along the split dim: split another one instead of gathering.
        (lambda x: lax.sort(x, dimension=1), S1, "S(0)", "S(0)"),
    ],
)
def test_one_operand(function, component, cast, result, line):
    assert deduced(function, line, ((4, 4), component)) == ([cast], result)


def test_one_row_of_a_split_table_is_read_as_a_partial_sum(line):
    def read(x):
        return lax.slice(x, (3, 0), (4, 8))

    assert deduced(read, line, ((64, 8), S0)) == (["P"], "P")


def test_a_bias_is_gathered_before_it_is_spread(line):
    def add_bias(x, b):
        return x + b[None]

    assert deduced(add_bias, line, ((4, 8), S0), ((8,), S0))[1] == "S(0)"
    explained = sbp.explain(
        add_bias,
        programs.struct((4, 8), line, (S0,)),
        programs.struct((8,), line, (S0,)),
    )
    assert explained.collectives == {"all-gather": 1}
    assert explained.num_bytes == 8 * 4 // 2


def mlp(x, w1, b1, w2, b2):
    return jax.nn.gelu(x @ w1 + b1[None]) @ w2 + b2[None]


def place_mlp(grid):
    values = normal(8, 16), normal(16, 32), normal(32), normal(32, 16), normal(16)
    signatures = "S(0),B", "B,S(1)", "B,S(0)", "B,S(0)", "B,B"
    pairs = zip(values, map(parse, signatures), strict=True)
    return values, [place(v, grid, s) for v, s in pairs]


def test_mlp_of_columns_then_rows_has_one_all_reduce(grid):
    dense, args = place_mlp(grid)
    jitted = sbp.jit(mlp)

    y = jitted(*args)

    assert (
        str(jax.typeof(y)) == "ShapedArray(float32[8@data,16])"
        or str(jax.typeof(y)) == "float32[8@data,16]"
    )
    assert_equal(y, mlp(*dense))
    assert sbp.explain(jitted, *args).collectives == {"all-reduce": 1}
    assert programs.compiled_collectives(jitted.lower(*args)) == {"all-reduce": 1}


def test_statistics_of_a_partial_sum_are_taken_after_it_is_added_up(line):
    def variance(x, w):
        y = x @ w
        return jnp.mean(y**2) - jnp.mean(y) ** 2 + jnp.mean(y)

    operands = (
        programs.struct((4, 6), line, (S1,)),
        programs.struct((6, 8), line, (S0,)),
    )
    explained = sbp.explain(variance, *operands)

    assert explained.collectives == {"all-reduce": 1}
    assert explained.num_bytes == 4 * 8 * 4


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_block_has_two_all_reduces_forward_and_two_backward(norm_position, grid):
    apply, params = programs.block(norm_position)
    x = normal(4, 8, 16)
    placed = programs.place_block(params, grid), place(x, grid, (S0, B))

    def loss(params, x):
        return jnp.sum(apply(params, x) ** 2)

    forward, backward = sbp.jit(apply), sbp.jit(jax.grad(loss, argnums=(0, 1)))
    explained = sbp.explain(forward, *placed)

    assert explained.collectives == {"all-reduce": 2}
    assert explained.num_bytes == 2 * 2 * x.nbytes // 2 // 2  # S(0) on data, P
    assert programs.compiled_collectives(forward.lower(*placed)) == {"all-reduce": 2}
    assert_equal(forward(*placed), apply(params, x))
    assert_equal(backward(*placed), jax.grad(loss, argnums=(0, 1))(params, x))
    over_tensor = [
        c
        for record in sbp.explain(backward, *placed)
        for c in record.collectives
        if "tensor" in c.axes
    ]
    assert [c.name for c in over_tensor] == ["all-reduce"] * 4
    assert {c.num_bytes for c in over_tensor} == {x.nbytes // 2}


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
    placed = place(x, grid, (S0, P))

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

    placed = place(x, line, (S0,)), place(index, line, (B,))
    grad, result = jax.jit(jax.grad(sbp.jit(pick), has_aux=True))(*placed)

    assert_equal(grad, jax.grad(pick, has_aux=True)(x, index)[0])
    assert_equal(result, index + 1)


def cross_entropy(logits_NV, targets_N):
    log_probs_NV = jax.nn.log_softmax(logits_NV)
    return -jnp.mean(jnp.take_along_axis(log_probs_NV, targets_N[:, None], axis=1))


def test_cross_entropy_over_a_split_vocabulary_never_gathers_it(line):
    logits, targets = normal(8, 32), np.arange(8, dtype=np.int32) * 3
    placed = place(logits, line, (S1,)), place(targets, line, (B,))
    step = sbp.jit(jax.value_and_grad(cross_entropy))

    explained = sbp.explain(step, *placed)

    assert_equal(step(*placed), jax.value_and_grad(cross_entropy)(logits, targets))
    assert set(explained.collectives) == {"all-reduce"}
    assert explained.num_bytes <= 3 * targets.nbytes  # a few numbers per row
    assert sbp.signature_of(step(*placed)[1]) == (S1,)


@pytest.mark.parametrize(
    ("table", "result"),
    [((B, S0), (S0, P)), ((B, S1), (S0, sbp.split(2))), ((S1, S0), (sbp.split(2), P))],
)
def test_embedding_by_rows_and_by_columns(table, result, grid):
    values, tokens = normal(8, 6), np.arange(8, dtype=np.int32).reshape(4, 2)
    placed = place(values, grid, table), place(tokens, grid, (S0, B))

    y = sbp.embedding(*placed)

    assert sbp.signature_of(y) == result
    assert_equal(y, values[tokens])


def test_dropout_with_a_key_per_sample_stays_split(line):
    x, keys = normal(4, 6), jax.random.split(jax.random.key(1), 4)

    def dropout(keys, x):
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, 3)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (6,)))(keys)
        return jnp.where(keep, x, 0)

    y = sbp.jit(dropout)(keys, place(x, line, (S0,)))

    assert sbp.signature_of(y) == (S0,)
    assert_equal(y, dropout(keys, x))


def test_scan_over_layers_keeps_the_carry_split(grid):
    x, w = normal(4, 8), normal(3, 8, 8) / 3
    placed = place(x, grid, (S0, B)), place(w, grid, (B, sbp.split(2)))

    def layers(x, w):
        def layer(x, w):
            y = jnp.tanh(x @ w) @ w.T
            return y, jnp.sum(y)

        return lax.scan(layer, x, w)

    jitted = sbp.jit(layers)
    explained = sbp.explain(jitted, *placed)

    assert_equal(jitted(*placed), layers(x, w))
    assert explained.collectives["all-reduce"] >= 3  # one in each turn
    assert_equal(
        sbp.jit(jax.grad(lambda *a: jnp.sum(layers(*a)[0])))(*placed),
        jax.grad(lambda *a: jnp.sum(layers(*a)[0]))(x, w),
    )


def test_gradient_accumulation_adds_up_once_after_the_loop(line):
    x, w = normal(3, 4, 6), normal(6, 2)
    placed = place(x, line, (S1,)), place(w, line, (B,))

    def accumulate(x, w):
        def add(total, x):
            grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
            return total + grad, None

        return lax.scan(add, jnp.zeros_like(w), x)[0]

    jitted = sbp.jit(accumulate)

    assert sbp.explain(jitted, *placed).collectives == {"all-reduce": 1}
    assert_equal(jitted(*placed), accumulate(x, w))


def test_while_and_cond(line):
    x, step = normal(4, 6), normal(4, 6, seed=1)
    placed = place(x, line, (S0,)), place(step, line, (P,))

    def walk(x, step):
        def turn(state):
            i, x = state
            return i + 1, lax.cond(i > 1, lambda x: x + step, lambda x: -x, x)

        return lax.while_loop(lambda state: jnp.sum(state[1] ** 2) < 90, turn, (0, x))

    assert_equal(sbp.jit(walk)(*placed), walk(x, step))


def test_carry_that_changes_its_signature_in_each_turn(line):
    x = normal(4, 4)

    def rotate(x):
        return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x.T) @ x, x)

    assert_equal(sbp.jit(rotate)(place(x, line, (S0,))), rotate(x))


def test_rematerialization_and_custom_rules_are_seen_through(line):
    x = normal(4, 6)

    @jax.custom_vjp
    def clip_gradient(x):
        return x

    clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

    @jax.checkpoint
    def loss(x):
        return jnp.sum(jax.nn.silu(jnp.sin(clip_gradient(jax.nn.relu(x)))))

    placed = place(x, line, (S0,))
    assert_equal(sbp.jit(jax.grad(loss))(placed), jax.grad(loss)(x))
    assert sbp.explain(jax.grad(loss), placed).collectives == {}


def test_three_axes_and_an_axis_of_one_device():
    cube = sbp.placement("cpu", np.arange(8).reshape(2, 2, 2), ("a", "b", "c"))
    flat = sbp.placement("cpu", [[0], [1]], ("a", "b"))
    x, w = normal(8, 12), normal(12, 4)

    def product(x, w):
        return jax.nn.softmax(x @ w)

    y = sbp.jit(product)(place(x, cube, (S0, S1, P)), place(w, cube, (B, S0, S1)))
    z = sbp.jit(product)(place(x, flat, (S0, P)), place(w, flat, (P, S1)))

    assert_equal(y, product(x, w))
    assert_equal(z, product(x, w))


def test_results_get_the_signatures_asked_for(grid):
    x = normal(4, 6)
    placed = place(x, grid, (S0, S1))

    def sums(x):
        return {"rows": jnp.sum(x, 1), "both": (x @ x.T, x)}

    kept = sbp.jit(sums, partial_outputs="keep")(placed)
    asked = sbp.jit(sums, out_sbp={"rows": None, "both": {"tensor": S0}})(placed)

    assert sbp.signature_of(kept["rows"]) == (S0, P)
    assert sbp.signature_of(asked["rows"]) == (S0, B)
    assert [sbp.signature_of(y) for y in asked["both"]] == [(B, S0)] * 2
    assert_equal(kept, sums(x))
    assert_equal(asked, sums(x))


def test_a_partial_sum_asked_to_be_split_is_reduce_scattered(line):
    x, w = normal(4, 6), normal(6, 8)
    placed = place(x, line, (S1,)), place(w, line, (S0,))
    jitted = sbp.jit(jnp.matmul, out_sbp=S1)

    assert programs.compiled_collectives(jitted.lower(*placed)) == {"reduce-scatter": 1}
    assert_equal(jitted(*placed), x @ w)


def test_constrain_pins_an_intermediate(grid):
    x = normal(4, 8)
    placed = place(x, grid, (S0, B))

    def function(x):
        y = sbp.constrain(jnp.tanh(x), {"tensor": S1})
        return jnp.exp(y)

    y = sbp.jit(function)(placed)

    assert sbp.signature_of(y) == (B, S1)
    assert_equal(y, function(x))


def test_jit_inside_jit_is_deduced_by_the_outer_one(line):
    x, w = normal(4, 6), normal(6, 8)
    placed = place(x, line, (S1,)), place(w, line, (S0,))
    inner = sbp.jit(jnp.matmul)  # on its own it would add up

    def outer(x, w):
        return inner(x, w) + sbp.matmul(x, w)

    assert sbp.explain(outer, *placed).collectives == {"all-reduce": 1}
    assert_equal(sbp.jit(outer)(*placed), 2 * (x @ w))


def test_static_and_keyword_arguments(line):
    x = normal(4, 6)
    scale = sbp.jit(lambda x, *, by, kind: x * by if kind == "mul" else x / by,
                    static_argnames=("kind",))  # fmt: skip
    placed = place(x, line, (S0,))

    assert_equal(scale(placed, by=2.0, kind="mul"), x * 2)
    assert_equal(scale(placed, by=2.0, kind="div"), x / 2)


def test_an_operation_without_rules_warns_that_it_gathers(line):
    x = np.eye(4, dtype=np.float32) * 4

    with pytest.warns(FallbackWarning, match="computes cholesky on every device"):
        y = sbp.jit(jnp.linalg.cholesky)(place(x, line, (S0,)))
    assert_equal(y, np.linalg.cholesky(x))
    # Nothing to say where nothing is gathered.
    assert_equal(sbp.jit(jnp.linalg.cholesky)(place(x, line, (B,))), y)


def test_low_precision_and_integers_keep_their_dtype(line):
    x = normal(4, 8).astype(jnp.bfloat16)
    n = np.arange(32, dtype=np.int8).reshape(4, 8)
    y = sbp.jit(lambda x: x.astype(jnp.float32).sum(1))(place(x, line, (S1,)))
    z = sbp.jit(lambda n: n.sum(0, dtype=jnp.int8) // 2)(place(n, line, (P,)))

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
        sbp.add(place(x, line, (S0,)), place(x, other, (S0,)))


def test_a_global_tensor_closed_over_is_an_error(line):
    closed = place(np.ones(4, np.float32), line, (S0,))

    with pytest.raises(ValueError, match="closes over a global tensor.*argument"):
        sbp.jit(lambda x: jnp.sum(closed) + x)(closed)


def test_out_sbp_that_does_not_fit_is_an_error(line):
    x = place(np.ones((4, 5), np.float32), line, (S0,))

    with pytest.raises(ValueError, match="names a dim that a tensor of 2 dims"):
        sbp.jit(jnp.tanh, out_sbp=sbp.split(2))(x)
    with pytest.raises(ValueError, match="is no prefix of the results"):
        sbp.jit(jnp.tanh, out_sbp=(S0, S0, None))(x)
    with pytest.raises(ValueError, match="5 is not divisible by 2"):
        sbp.jit(jnp.tanh, out_sbp=sbp.split(1))(x)
