"""A vocabulary over the stages gives what the whole one gives, and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from launch.vocabulary import StageVocabulary, over_stages
from models.layers import BlockConfig
from models.vocabulary import Vocabulary
from sbp.pipeline.region import ManualRegion

SIZE, PADDED_SIZE, B, N, D = 13, 16, 2, 3, 4
TOKENS_BN = jnp.array([[0, 3, 4], [12, 7, 8]])  # of every stage


@pytest.fixture(scope="module")
def region():
    devices = np.array(jax.devices()[:4]).reshape(4, 1)
    mesh = Mesh(devices, ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    return ManualRegion(mesh, ("stage", "data"))


def make_vocabulary(table_VD=None):
    config = BlockConfig(model_dim=D)
    vocabulary = Vocabulary(SIZE, PADDED_SIZE, config, rngs=nnx.Rngs(0))
    if table_VD is not None:
        vocabulary.embedding = nnx.Param(table_VD)
    return vocabulary


def evaluate(make, table_VD, bias_V, h_BND, part_of=lambda x: x):
    """Everything that a vocabulary computes, and the gradients of a sum of it."""

    def run(table_VD, bias_V, h_BND):
        vocabulary = make(table_VD)
        embedded_BND = vocabulary.embed(TOKENS_BN)
        loss_BN, is_right_BN = vocabulary.cross_entropy(h_BND, bias_V, TOKENS_BN)
        weights_BN = jnp.arange(6.0).reshape(B, N)
        total = (loss_BN * weights_BN).sum() + (embedded_BND * h_BND).sum()
        return part_of(total), (embedded_BND, loss_BN, is_right_BN)

    _, vjp, found = jax.vjp(run, table_VD, bias_V, h_BND, has_aux=True)
    return found, vjp(part_of(jnp.ones(())))


def test_results_and_gradients_are_those_of_the_whole_table(region):
    keys = jax.random.split(jax.random.key(0), 3)
    table_VD = jax.random.normal(keys[0], (PADDED_SIZE, D))
    bias_V = jax.random.normal(keys[1], (PADDED_SIZE,))
    h_BND = jax.random.normal(keys[2], (B, N, D))

    def on_stage(table_VD, bias_V, h_BND):
        arguments = region.varying((table_VD, bias_V, h_BND))
        is_last = region.varying(region.index("stage")) == 3
        found, (grad_table, grad_bias, grad_h) = evaluate(
            lambda own_VD: StageVocabulary(make_vocabulary(own_VD), region),
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
