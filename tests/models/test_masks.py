import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from models.masks import AttentionMask

MASK = AttentionMask(
    is_causal=True,
    is_key=jnp.array([[True, True, True, False], [True] * 4]),
    documents=jnp.array([[0, 0, 1, 1], [5, 5, 5, 5]]),
)
EXPECTED = [
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]],
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
]


def test_query_sees_what_all_rules_show():
    np.testing.assert_array_equal(MASK.dense(4, 4)[:, 0], EXPECTED)
    assert AttentionMask().dense(4, 4) is None
    assert AttentionMask(is_causal=True).dense(4, 4).shape == (1, 1, 4, 4)


def test_block_is_a_part_of_the_whole_also_at_places_of_run_time():
    whole = np.asarray(MASK.dense(4, 4))

    @jax.jit
    def block(first_query, first_key):
        return MASK.block(first_query, 2, first_key, 3).dense(2, 3)

    for query in range(3):
        for key in range(2):
            part = whole[:, :, query : query + 2, key : key + 3]
            np.testing.assert_array_equal(block(query, key), part)


def test_block_of_a_block_counts_from_the_start_of_the_first():
    inner = MASK.block(1, 3, 0, 4).block(1, 2, 1, 2)
    np.testing.assert_array_equal(inner.dense(2, 2), MASK.dense(4, 4)[:, :, 2:4, 1:3])


def test_added_keys_are_hidden_from_all():
    padded = MASK.pad(2, 3).dense(6, 7)
    np.testing.assert_array_equal(padded[:, :, :4, :4], MASK.dense(4, 4))
    assert not padded[..., 4:].any()


def test_mask_is_a_tree_of_its_arrays():
    leaves, structure = jax.tree.flatten(MASK)
    assert len(leaves) == 2
    assert jax.tree.unflatten(structure, leaves).is_causal
    other = dataclasses.replace(MASK, is_causal=False)
    assert jax.tree.structure(other) != structure
