"""The loss by chunks is that of all scores at once, and needs little memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import virtual_gpus
from models import bert, gpt2
from models.losses import cross_entropy
from models.vocabulary_loss import Scoring, sum_cross_entropy

SIZE, V, D, B, N = 33, 40, 8, 3, 5
MEMORY_CASES = ["cpu-float32", "h100-80g-float32", "h100-80g-bfloat16"]


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 5)
    table_VD = jax.random.normal(keys[0], (V, D))
    bias_V = jax.random.normal(keys[1], (V,))
    h_BND = jax.random.normal(keys[2], (B, N, D)).astype(dtype)
    targets_BN = jax.random.randint(keys[3], (B, N), 0, SIZE)
    weights_BN = jax.random.uniform(keys[4], (B, N))
    return table_VD, bias_V, h_BND, targets_BN, weights_BN


def whole(table_VD, bias_V, h_BND, targets_BN, weights_BN):
    logits_BNV = Scoring(size=SIZE).logits(table_VD, bias_V, h_BND)
    loss_BN, correct_BN = cross_entropy(logits_BNV, targets_BN)
    return (loss_BN * weights_BN).sum(), (correct_BN * weights_BN).sum()


def gradients(loss, arguments):
    """Sums, and gradients of three times the first."""

    def scaled(*trained):
        total, num_correct = loss(*trained, *arguments[3:])
        return 3 * total, (total, num_correct)

    run = jax.grad(scaled, argnums=(0, 1, 2), has_aux=True)
    return jax.jit(run)(*arguments[:3])


@pytest.mark.parametrize("chunk_size", [None, 4, 7, 100])
def test_sums_and_gradients_are_those_of_all_scores_at_once(chunk_size):
    by_chunks = functools.partial(
        sum_cross_entropy, Scoring(size=SIZE, chunk_size=chunk_size)
    )
    arguments = inputs()
    found, expected = gradients(by_chunks, arguments), gradients(whole, arguments)
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * scale)
    # Without gradients other code runs.
    sums = jax.jit(by_chunks)(*arguments)
    np.testing.assert_allclose(sums, expected[1], rtol=1e-6)


def test_gradients_of_bfloat16_stay_near_and_those_of_the_table_are_float32():
    by_chunks = functools.partial(sum_cross_entropy, Scoring(size=SIZE, chunk_size=4))
    found, _ = gradients(by_chunks, inputs(jnp.bfloat16))
    expected, _ = gradients(whole, inputs())
    assert [g.dtype.name for g in found] == ["float32", "float32", "bfloat16"]
    for ours, theirs in zip(found, expected, strict=True):
        error = np.abs(np.asarray(ours, np.float32) - theirs).max()
        assert error < 0.02 * np.abs(theirs).max()


def test_predictions_without_weight_have_no_gradient():
    table_VD, bias_V, h_BND, targets_BN, _ = inputs()
    weights_BN = jnp.zeros((B, N)).at[1, 2].set(1.0)
    by_chunks = functools.partial(sum_cross_entropy, Scoring(size=SIZE, chunk_size=4))
    arguments = table_VD, bias_V, h_BND, targets_BN, weights_BN
    (_, _, grad_BND), _ = gradients(by_chunks, arguments)
    has_gradient = np.abs(grad_BND).max(-1) > 0
    assert np.argwhere(has_gradient).tolist() == [[1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("case", MEMORY_CASES)
def test_peak_is_below_an_eighth_of_all_scores_with_the_default_chunks(case):
    """Of a vocabulary of 30k and 8k predictions, read off the compiled program."""
    kind, _, dtype = case.rpartition("-")
    sharding = None
    if kind != "cpu":
        if not virtual_gpus.has_plugin():
            pytest.skip("needs JAX's CUDA plugin: pip install -e '.[plan]'")
        gpus = virtual_gpus.virtual_gpus(kind, num_hosts=1, gpus_per_host=1)
        sharding = jax.sharding.SingleDeviceSharding(gpus[0])
    config = bert.SIZES["base"]
    size, dim, shape = config.padded_vocab_size, config.model_dim, (8, 1024)
    scoring = Scoring(size=config.vocab_size, chunk_size=config.loss_chunk_size)

    def loss(*arguments):
        return sum_cross_entropy(scoring, *arguments)

    shapes = [
        jax.ShapeDtypeStruct(dims, kind_of_number, sharding=sharding)
        for dims, kind_of_number in [
            ((size, dim), jnp.float32),
            ((size,), jnp.float32),
            ((*shape, dim), dtype),
            (shape, jnp.int32),
            (shape, jnp.float32),
        ]
    ]
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    memory = run.lower(*shapes).compile().memory_analysis()
    all_scores = shape[0] * shape[1] * size * 4
    print(f"{case}: {memory.temp_size_in_bytes / 1e6:.0f} MB of {all_scores / 1e6:.0f}")
    assert memory.temp_size_in_bytes < all_scores / 8


@pytest.mark.parametrize("config", [bert.BertConfig, gpt2.Gpt2Config])
def test_chunks_of_no_prediction_are_an_error(config):
    (sentence,) = config(loss_chunk_size=0).broken_rules()
    assert sentence == "loss_chunk_size=0 must be at least 1."
