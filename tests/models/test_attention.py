"""The implementations of attention give what the plain one gives, and its gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import blocked_attention, weight_dropout
from models.attention import attend, attend_blocked, attend_cudnn
from models.head_blocks import Heads
from models.layers import BlockConfig, dropout
from models.masks import AttentionMask

B, H, K = 2, 2, 8
TOLERANCE = 2e-6  # of the largest value
# Queries and keys: one block that is not filled; several that are not.
LENGTHS = [(13, 13), (600, 600), (30, 1160), (1160, 30)]


def mask_of(kind, num_queries, num_keys):
    """Returns a mask under which every query sees a key."""
    documents = np.sort(np.random.default_rng(0).integers(0, 4, (B, num_keys)))
    documents[:, 0] = 0
    is_key = np.arange(num_keys) < np.array([[num_keys - 3], [num_keys // 2]])
    own = documents[:, np.linspace(0, num_keys - 1, num_queries).astype(int)]
    of_documents = dict(
        documents=jnp.asarray(own), key_documents=jnp.asarray(documents)
    )
    return {
        "nothing": None,
        "causal": AttentionMask(is_causal=True),
        "padding": AttentionMask(is_key=jnp.asarray(is_key)),
        "documents": AttentionMask(**of_documents),
        "causal_documents": AttentionMask(is_causal=True, **of_documents),
        "shifted": AttentionMask(is_causal=True, shift=jnp.int32(num_keys // 2)),
    }[kind]


@functools.cache
def inputs(num_queries, num_keys, num_heads=H):
    keys = jax.random.split(jax.random.key(0), 4)
    lengths = num_queries, num_keys, num_keys, num_queries
    return [
        jax.random.normal(key, (B, length, num_heads, K))
        for key, length in zip(keys, lengths, strict=True)
    ]


def values_and_gradients(core, mask, lengths, rate=0.0, dtype=jnp.float32):
    @jax.jit
    def run(q, k, v, grad):
        keys_B = jax.random.split(jax.random.key(1), B)
        values, vjp = jax.vjp(
            lambda q, k, v: core(q, k, v, mask, rate=rate, keys_B=keys_B), q, k, v
        )
        return values, *vjp(grad)

    return run(*(x.astype(dtype) for x in inputs(*lengths)))


def assert_near(actual, expected, tolerance=TOLERANCE):
    for ours, theirs in zip(actual, expected, strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max()
        )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", ["nothing", "causal", "padding", "documents"])
def test_blocked_gives_the_values_and_gradients_of_plain(kind, lengths):
    mask = mask_of(kind, *lengths)
    assert_near(
        values_and_gradients(attend_blocked, mask, lengths),
        values_and_gradients(attend, mask, lengths),
    )


@pytest.mark.parametrize("kind", ["causal_documents", "shifted"])
def test_blocked_knows_rules_together_and_queries_behind_their_keys(kind):
    lengths = (30, 1160) if kind == "shifted" else (600, 600)
    mask = mask_of(kind, *lengths)
    assert_near(
        values_and_gradients(attend_blocked, mask, lengths),
        values_and_gradients(attend, mask, lengths),
    )


def test_blocked_takes_heads_in_groups_of_which_the_last_is_not_full():
    mask, lengths = mask_of("padding", 13, 13), (13, 13, 19)
    heads = Heads.of(*inputs(*lengths)[:2], mask, None)
    assert 1 < heads.group < B * 19
    assert B * 19 % heads.group
    assert_near(
        values_and_gradients(attend_blocked, mask, lengths, rate=0.3),
        values_and_gradients(attend, mask, lengths, rate=0.3),
    )


def test_blocked_drops_the_weights_that_plain_drops():
    mask, lengths = mask_of("causal", 600, 600), (600, 600)
    dropped = values_and_gradients(attend, mask, lengths, rate=0.3)
    assert_near(values_and_gradients(attend_blocked, mask, lengths, rate=0.3), dropped)
    kept = values_and_gradients(attend, mask, lengths)
    assert np.abs(np.asarray(kept[0] - dropped[0])).max() > 0.1


def test_blocked_of_bfloat16_stays_near_the_one_of_float32():
    mask, lengths = mask_of("padding", 13, 13), (13, 13)
    found = values_and_gradients(attend_blocked, mask, lengths, dtype=jnp.bfloat16)
    assert {x.dtype.name for x in found} == {"bfloat16"}
    assert_near(found, values_and_gradients(attend, mask, lengths), tolerance=0.02)


@pytest.mark.parametrize("part", ["first", "others"])
def test_query_that_sees_no_key_gets_0_and_gives_no_gradient(part):
    """Whether or not others in its block see some."""
    q, k, v, grad = inputs(13, 13)
    is_hidden = np.arange(13) < (1 if part == "first" else 13)
    documents = np.where(is_hidden, 1, 0)[None].repeat(B, 0)
    mask = AttentionMask(
        documents=jnp.asarray(documents), key_documents=jnp.zeros((B, 13), int)
    )

    @jax.jit
    def run(q, k, v):
        values, vjp = jax.vjp(lambda *x: attend_blocked(*x, mask), q, k, v)
        return values, vjp(grad)

    values, grads = run(q, k, v)
    assert (np.asarray(values)[:, is_hidden] == 0).all()
    assert (np.asarray(grads[0])[:, is_hidden] == 0).all()
    assert all(np.isfinite(x).all() for x in grads)


def test_gradient_of_a_causal_query_is_0_on_all_later_keys():
    q, k, v, _ = inputs(600, 600)
    mask = AttentionMask(is_causal=True)

    @jax.jit
    def gradient(position):
        def value(k, v):
            return attend_blocked(q, k, v, mask)[:, position].sum()

        return jax.grad(value, argnums=(0, 1))(k, v)

    for position in (0, 303, 304, 599):
        for grad in gradient(position):
            seen = np.abs(grad).max((0, 2, 3)) > 0
            assert not seen[position + 1 :].any()
            assert seen[position]


def test_attention_to_parts_of_the_keys_is_merged_to_attention_to_all():
    q, k, v, grad = inputs(30, 1160)
    mask = mask_of("causal_documents", 30, 1160)
    mask = dataclasses.replace(mask, shift=jnp.int32(800))
    cuts = ((0, 360), (360, 800))

    @jax.jit
    def run(q, k, v):
        whole = blocked_attention.attention_forward(q, k, v, mask)
        parts = [
            (k[:, i : i + n], v[:, i : i + n], mask.block(0, 30, i, n)) for i, n in cuts
        ]
        found = [blocked_attention.attention_forward(q, *part) for part in parts]
        merged = blocked_attention.merge(*found)
        results = dict(out_BLHK=merged[0], lse_BLH=merged[1], grad_BLHK=grad)
        grads = [
            blocked_attention.attention_backward(q, *part, None, **results)
            for part in parts
        ]
        grad_k, grad_v = (
            jnp.concatenate([g[i] for g in grads], axis=1) for i in (1, 2)
        )
        return whole, (*merged, grads[0][0] + grads[1][0], grad_k, grad_v)

    whole, merged = run(q, k, v)
    expected = values_and_gradients(attend_blocked, mask, (30, 1160))
    assert_near((*merged[:2], *merged[2:]), (*whole, *expected[1:]))


def test_memory_of_blocked_grows_with_the_length_and_not_its_square():
    def temporary_bytes(core, length):
        x = jax.ShapeDtypeStruct((1, length, 1, K), jnp.float32)
        mask = AttentionMask(is_causal=True)

        def run(q, k, v, grad):
            return jax.vjp(lambda *x: core(*x, mask), q, k, v)[1](grad)

        return jax.jit(run).lower(x, x, x, x).compile().memory_analysis()

    short, long = (
        temporary_bytes(attend_blocked, n).temp_size_in_bytes for n in (1024, 8192)
    )
    assert long < 8.5 * short
    assert long < 8192**2 * 4 / 50, "of one array of scores"


def test_what_is_dropped_of_a_block_is_that_of_the_whole_mask():
    keys_B = jax.random.split(jax.random.key(3), B)
    shape, rate = (5, 40, 70), 0.25
    whole = dropout(jnp.ones((B, *shape)), rate, keys_B) > 0
    drops = weight_dropout.make(rate, keys_B, num_queries=40, num_keys=70)
    part = dataclasses.replace(drops, first_head=2, first_query=10, first_key=20)
    keep = part.of_head(drops.words[1], 1)(3, 4, (7, 9))
    np.testing.assert_array_equal(keep, whole[1, 3, 13:20, 24:33])


@pytest.mark.parametrize("row", [123456789, 4000000000])
def test_bits_of_places_past_32_bits_use_the_high_word(row):
    high, low = weight_dropout._times(jnp.uint32(row), 70001)
    assert (int(high) << 32) + int(low) == row * 70001


def test_dropout_in_blocks_by_other_keys_is_an_error():
    keys_B = jax.random.split(jax.random.key(0, impl="rbg"), B)
    with pytest.raises(ValueError, match="keys of 'rbg', and knows the bits of"):
        weight_dropout.make(0.5, keys_B, num_queries=2, num_keys=2)
    assert weight_dropout.make(0.0, keys_B, num_queries=2, num_keys=2) is None


def test_cudnn_refuses_to_drop_weights():
    q, k, v, _ = inputs(13, 13)
    keys_B = jax.random.split(jax.random.key(0), B)
    with pytest.raises(ValueError, match="attention_dropout_rate=0.1, but attention="):
        attend_cudnn(q, k, v, None, rate=0.1, keys_B=keys_B)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"attention": "flash"}, "attention='flash' is not one of 'auto', 'plain'"),
        (
            {"attention": "cudnn", "dtype": "float32"},
            "attention='cudnn' computes in float16 or bfloat16, but dtype='float32'.",
        ),
        (
            {"attention": "cudnn", "attention_dropout_rate": 0.1},
            "attention='cudnn' drops no weights, but attention_dropout_rate=0.1.",
        ),
        (
            {"attention": "cudnn", "num_heads": 32},
            "a multiple of 8 up to 128, but model_dim=128 / num_heads=32 = 4.",
        ),
    ],
    ids=["unknown", "dtype", "dropout", "heads"],
)
def test_broken_rule_of_attention_gives_the_values(fields, rule):
    (sentence,) = BlockConfig(**{"dtype": "bfloat16", **fields}).broken_rules()
    assert rule in sentence
