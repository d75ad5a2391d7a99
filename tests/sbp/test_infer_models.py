"""Parts of models under `sbp.jit`: values, gradients and collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax
from sharded import assert_equal, normal, place

import sbp
from sbp import broadcast, partial_sum, split
from sbp.signature import parse
from sbp.spec import signature_by_axis


@pytest.fixture(scope="module")
def line():
    """Two devices along one axis."""
    return sbp.placement("cpu", [0, 1], ("x",))


@pytest.fixture(scope="module")
def grid():
    """2 x 2 devices."""
    return sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))


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
        programs.struct((4, 6), line, (split(1),)),
        programs.struct((6, 8), line, (split(0),)),
    )
    explained = sbp.explain(variance, *operands)

    assert explained.collectives == {"all-reduce": 1}
    assert explained.num_bytes == 4 * 8 * 4


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_block_has_two_all_reduces_forward_and_two_backward(norm_position, grid):
    apply, params = programs.block(norm_position)
    x = normal(4, 8, 16)
    placed = programs.place_block(params, grid), place(x, grid, (split(0), broadcast))

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


def test_a_whole_bert_trains_as_on_one_device(grid):
    loss, params, rows, batch = programs.bert_loss()
    signatures = {
        path: signature_by_axis(row, grid.axis_names) for path, row in rows.items()
    }
    placed = (
        {path: place(v, grid, signatures[path]) for path, v in params.items()},
        {name: place(v, grid, (split(0), broadcast)) for name, v in batch.items()},
    )
    step = sbp.jit(jax.value_and_grad(loss))

    value, grads = step(*placed)

    assert_equal((value, grads), jax.value_and_grad(loss)(params, batch))
    assert not [r.operation for r in sbp.explain(step, *placed) if r.note]
    for path, grad in grads.items():
        assert sbp.signature_of(grad)[1] == signatures[path][1]
    # Embedding and two halves of the block; for the softmax the highest score of each
    # row, and then two numbers together.
    forward = sbp.explain(loss, *placed)
    over_tensor = [c for r in forward for c in r.collectives if c.axes == ("tensor",)]
    sizes = sorted(c.num_bytes for c in over_tensor)
    assert [c.name for c in over_tensor] == ["all-reduce"] * 5
    assert sizes == [2 * 2 * 4, 2 * 2 * 2 * 4] + [2 * 8 * 16 * 4] * 3


def cross_entropy(logits_NV, targets_N):
    log_probs_NV = jax.nn.log_softmax(logits_NV)
    return -jnp.mean(jnp.take_along_axis(log_probs_NV, targets_N[:, None], axis=1))


def test_cross_entropy_over_a_split_vocabulary_never_gathers_it(line):
    logits, targets = normal(8, 32), np.arange(8, dtype=np.int32) * 3
    placed = place(logits, line, (split(1),)), place(targets, line, (broadcast,))
    step = sbp.jit(jax.value_and_grad(cross_entropy))

    explained = sbp.explain(step, *placed)

    assert_equal(step(*placed), jax.value_and_grad(cross_entropy)(logits, targets))
    assert set(explained.collectives) == {"all-reduce"}
    assert explained.num_bytes <= 3 * targets.nbytes  # a few numbers per row
    assert sbp.signature_of(step(*placed)[1]) == (split(1),)


@pytest.mark.parametrize(
    ("table", "result"),
    [
        ((broadcast, split(0)), (split(0), partial_sum)),
        ((broadcast, split(1)), (split(0), split(2))),
        ((split(1), split(0)), (split(2), partial_sum)),
    ],
)
def test_embedding_by_rows_and_by_columns(table, result, grid):
    values, tokens = normal(8, 6), np.arange(8, dtype=np.int32).reshape(4, 2)
    placed = place(values, grid, table), place(tokens, grid, (split(0), broadcast))

    y = sbp.embedding(*placed)

    assert sbp.signature_of(y) == result
    assert_equal(y, values[tokens])


def test_dropout_with_a_key_per_sample_stays_split(line):
    x, keys = normal(4, 6), jax.random.split(jax.random.key(1), 4)

    def dropout(keys, x):
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, 3)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (6,)))(keys)
        return jnp.where(keep, x, 0)

    y = sbp.jit(dropout)(keys, place(x, line, (split(0),)))

    assert sbp.signature_of(y) == (split(0),)
    assert_equal(y, dropout(keys, x))


def test_scan_over_layers_keeps_the_carry_split(grid):
    x, w = normal(4, 8), normal(3, 8, 8) / 3
    placed = (
        place(x, grid, (split(0), broadcast)),
        place(w, grid, (broadcast, split(2))),
    )

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
    placed = place(x, line, (split(1),)), place(w, line, (broadcast,))

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
    placed = place(x, line, (split(0),)), place(step, line, (partial_sum,))

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

    assert_equal(sbp.jit(rotate)(place(x, line, (split(0),))), rotate(x))


def test_rematerialization_and_custom_rules_are_seen_through(line):
    x = normal(4, 6)

    @jax.custom_vjp
    def clip_gradient(x):
        return x

    clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

    @jax.checkpoint
    def loss(x):
        return jnp.sum(jax.nn.silu(jnp.sin(clip_gradient(jax.nn.relu(x)))))

    placed = place(x, line, (split(0),))
    assert_equal(sbp.jit(jax.grad(loss))(placed), jax.grad(loss)(x))
    assert sbp.explain(jax.grad(loss), placed).collectives == {}
