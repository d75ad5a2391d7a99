import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import packing
from tests.models import cases

LENGTHS = (3, 1, 6)  # of the documents that fill the rows of ten tokens


def packed_batch(case):
    """Returns one row of three documents, and each document as a row of its own."""
    tokens = np.asarray(case.batch["tokens"])[0, : sum(LENGTHS)]
    ends = np.cumsum(LENGTHS)
    documents = np.repeat(np.arange(3), LENGTHS)
    packed = dict(tokens=tokens[None], documents=documents[None])
    alone = np.zeros((3, sum(LENGTHS)), np.int32)
    is_token = np.arange(sum(LENGTHS)) < np.array(LENGTHS)[:, None]
    for row, (end, length) in enumerate(zip(ends, LENGTHS, strict=True)):
        alone[row, :length] = tokens[end - length : end]
    separate = dict(tokens=alone)
    if case.name == "bert":
        for batch in (packed, separate):
            batch["segments"] = np.zeros_like(batch["tokens"])
        packed["is_token"] = np.ones_like(packed["tokens"], bool)
        separate["is_token"] = is_token
    to_jax = lambda batch: jax.tree.map(jnp.asarray, batch)  # noqa: E731 - one line
    return to_jax(packed), to_jax(separate), is_token


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_packed_documents_give_what_each_gives_alone(name):
    case = cases.load(name)
    packed, separate, is_token = packed_batch(case)

    @jax.jit
    def encode(batch):
        outer = {key: value for key, value in case.params.items() if key != "blocks"}
        x = case.model.embed(outer, batch, None)
        return cases.run_blocks(dataclasses.replace(case, batch=batch), case.params, x)

    expected = np.asarray(encode(separate))[is_token]
    np.testing.assert_allclose(encode(packed)[0], expected, atol=2e-6)
    unpacked = {key: value for key, value in packed.items() if key != "documents"}
    assert np.abs(encode(unpacked)[0] - expected).max() > 0.1


def test_documents_may_have_any_numbers_that_change_at_their_ends():
    documents = jnp.array([[7, 7, 0, 3, 3], [1, 2, 2, 2, 2]], jnp.int32)
    positions = packing.positions_in_document(documents)
    assert positions.tolist() == [[0, 1, 0, 0, 1], [0, 0, 1, 2, 3]]
