"""A vocabulary over the stages gives what the whole one gives, and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.vocabulary import StageVocabulary, over_stages
from models.layers import BlockConfig
from models.vocabulary import Vocabulary
from sbp.pipeline.region import ManualRegion
from tests import hlo

SIZE, PADDED_SIZE, B, N, D = 13, 16, 2, 3, 4
TOKENS_BN = jnp.array([[0, 3, 4], [12, 7, 8]])  # of every stage


@pytest.fixture(scope="module")
def region():
    devices = np.array(jax.devices()[:4]).reshape(4, 1)
    mesh = Mesh(devices, ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    return ManualRegion(mesh, ("stage", "data"))


def make_vocabulary(table_VD=None, chunk_size=None):
    config, sizes = BlockConfig(model_dim=D), (SIZE, PADDED_SIZE)
    vocabulary = Vocabulary(
        *sizes, config, loss_chunk_size=chunk_size, rngs=nnx.Rngs(0)
    )
    if table_VD is not None:
        vocabulary.embedding = nnx.Param(table_VD)
    return vocabulary


def evaluate(make, table_VD, bias_V, h_BND, part_of=lambda x: x):
    """Everything that a vocabulary computes, and the gradients of a sum of it."""

    def run(table_VD, bias_V, h_BND):
        vocabulary = make(table_VD)
        embedded_BND = vocabulary.embed(TOKENS_BN)
        weights_BN = jnp.arange(6.0).reshape(B, N)
        loss, num_right = vocabulary.cross_entropy(h_BND, bias_V, TOKENS_BN, weights_BN)
        total = 3 * loss + (embedded_BND * h_BND).sum()
        return part_of(total), (embedded_BND, loss, num_right)

    _, vjp, found = jax.vjp(run, table_VD, bias_V, h_BND, has_aux=True)
    return found, vjp(part_of(jnp.ones(())))


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_results_and_gradients_are_those_of_the_whole_table(region, chunk_size):
    keys = jax.random.split(jax.random.key(0), 3)
    table_VD = jax.random.normal(keys[0], (PADDED_SIZE, D))
    bias_V = jax.random.normal(keys[1], (PADDED_SIZE,))
    h_BND = jax.random.normal(keys[2], (B, N, D))

    def on_stage(table_VD, bias_V, h_BND):
        arguments = region.varying((table_VD, bias_V, h_BND))
        is_last = region.varying(region.index("stage")) == 3
        found, (grad_table, grad_bias, grad_h) = evaluate(
            lambda own_VD: StageVocabulary(make_vocabulary(own_VD, chunk_size), region),
            *arguments,
            # One stage counts, as in a pipeline.
            part_of=lambda total: jnp.where(is_last, total, 0),
        )
        return found, grad_table, grad_bias, region.psum(grad_h, "stage")

    program = region.run(
        on_stage,
        in_specs=(P("stage"), P("stage"), P()),
        out_specs=(P(), P("stage"), P("stage"), P()),
    )
    found, *grads = jax.jit(program)(table_VD, bias_V, h_BND)
    whole = jax.jit(functools.partial(evaluate, make_vocabulary))
    expected, expected_grads = whole(table_VD, bias_V, h_BND)
    for ours, theirs in zip(
        (*found, *grads), (*expected, *expected_grads), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


def test_table_split_over_tensor_is_never_gathered():
    """Not for the scores of a chunk, and not for the sum of its gradients."""
    devices = np.array(jax.devices()[:4])
    mesh = Mesh(devices, ("tensor",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("tensor")), NamedSharding(mesh, P())
    size, dim = 1024, 8

    def loss(table_VD, h_BND):
        vocabulary = make_vocabulary(table_VD, chunk_size=2)
        return vocabulary.cross_entropy(h_BND, None, TOKENS_BN, jnp.ones((B, N)))[0]

    program = jax.jit(
        jax.grad(loss, argnums=(0, 1)),
        in_shardings=(split, whole),
        out_shardings=(split, whole),
    )
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((size, dim), (B, N, dim))]
    text = program.lower(*shapes).compile().as_text()
    found = hlo.collectives(text)
    assert {c.name for c in found} == {"all-reduce"}
    # Maxima, sums and gradients of activations, of the two predictions of a chunk.
    assert all(c.loops and c.num_bytes <= 2 * dim * 4 for c in found)
    assert f"[{size}," not in text.partition("\n")[2]


def test_logits_are_gathered_and_padding_has_none(region):
    table_VD = jax.random.normal(jax.random.key(0), (PADDED_SIZE, D))
    h_BND = jax.random.normal(jax.random.key(1), (B, N, D))

    def on_stage(table_VD, h_BND):
        vocabulary = StageVocabulary(make_vocabulary(table_VD), region)
        return vocabulary.logits(h_BND, None)[None]

    program = region.run(on_stage, in_specs=(P("stage"), P()), out_specs=P("stage"))
    found_SBNV = jax.jit(program)(table_VD, h_BND)
    expected_BNV = make_vocabulary(table_VD).logits(h_BND, None)
    assert found_SBNV.shape == (4, B, N, PADDED_SIZE)
    for stage in range(4):
        np.testing.assert_allclose(
            found_SBNV[stage], expected_BNV, rtol=2e-6, atol=2e-6
        )
    assert (found_SBNV[..., SIZE:] == jnp.finfo(jnp.float32).min).all()


def test_every_vocabulary_of_a_model_is_replaced_wherever_it_is(region):
    class Inner(nnx.Module):
        def __init__(self):
            self.vocabulary = make_vocabulary()

    class Outer(nnx.Module):
        def __init__(self):
            self.inner = Inner()
            self.words = make_vocabulary()
            self.other = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    model = Outer()
    over_stages(region)(model)
    assert isinstance(model.inner.vocabulary, StageVocabulary)
    assert isinstance(model.words, StageVocabulary)
    assert isinstance(model.other, nnx.Linear)
