import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import bert
from models.bert import SIZES, Bert
from tests.models import cases


def count(config):
    state = nnx.state(nnx.eval_shape(lambda: Bert(config, rngs=nnx.Rngs(0))))
    return sum(leaf.size for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("size", "num_params"),
    [("tiny", 4_433_468), ("base", 110_106_428), ("large", 336_226_108)],
)
def test_parameters_are_as_many_as_those_published(size, num_params):
    assert count(dataclasses.replace(SIZES[size], vocab_multiple=1)) == num_params


def test_padding_of_the_vocabulary_adds_its_rows_and_biases():
    config = SIZES["large"]
    assert config.padded_vocab_size == 30592
    assert count(config) == 336_226_108 + (30592 - 30522) * (1024 + 1)


def test_norm_before_each_half_moves_one_norm_to_the_end():
    config = dataclasses.replace(SIZES["tiny"], norm_position="pre")
    assert count(config) == count(SIZES["tiny"])


@pytest.fixture(scope="module")
def case():
    return cases.load("bert")


@pytest.fixture(scope="module")
def embedding_gradient(case):
    """Gradient of the loss by what the first block is given, ``(B, L, D)``."""
    outer = {key: value for key, value in case.params.items() if key != "blocks"}

    def loss(x_BLD):
        x_BLD = cases.run_blocks(case, case.params, x_BLD)
        return cases.objective_of(case, outer, x_BLD)

    return jax.jit(jax.grad(loss))(case.model.embed(outer, case.batch, None))


def test_padding_has_no_influence_and_every_token_has(case, embedding_gradient):
    is_token_BL = np.asarray(case.batch["is_token"])
    norms_BL = np.linalg.norm(embedding_gradient, axis=-1)
    assert not is_token_BL.all()
    assert (norms_BL[~is_token_BL] == 0).all()
    assert (norms_BL[is_token_BL] > 1e-4).all()


def test_predictions_and_samples_of_weight_zero_do_not_count(case):
    shallow = cases.shallow(case)

    @jax.jit
    def means(batch):
        module = cases.module_of(shallow, shallow.params)
        return cases.objective(module, batch)[1]

    batch = dict(case.batch)
    batch["weights"] = batch["weights"].at[2:].set(0).at[0, 1].set(0)
    batch["sample_weights"] = batch["sample_weights"].at[2:].set(0)
    changed = dict(batch)
    changed["targets"] = jnp.where(batch["weights"] > 0, batch["targets"], 1)
    changed["tokens"] = batch["tokens"].at[2:].set(1)
    changed["is_random_next"] = batch["is_random_next"].at[2:].set(0)
    assert means(changed) == means(batch)
    changed["tokens"] = batch["tokens"].at[0].set(1)
    assert means(changed)["mlm_loss"] != means(batch)["mlm_loss"]


def test_accuracies_count_the_best_token_and_the_right_order(case):
    module = cases.module_of(case, case.params)

    @jax.jit
    def run(x_BLD, batch):
        return module.logits(x_BLD, batch), module.losses(x_BLD, batch)

    x_BLD = jax.random.normal(jax.random.key(0), (4, 10, 16))
    (logits_BNV, next_sentence), _ = run(x_BLD, case.batch)
    best_BN = logits_BNV.argmax(-1).astype(jnp.int32)
    _, sums = run(x_BLD, {**case.batch, "targets": best_BN})
    assert sums["mlm_accuracy"] == case.batch["weights"].sum()
    is_right_B = next_sentence.argmax(-1) == case.batch["is_random_next"]
    assert sums["nsp_accuracy"] == is_right_B.sum()


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1."),
        ({"max_len": 0}, "max_len=0 must be at least 1."),
        ({"num_segments": 1}, "num_segments=1 must be at least 2."),
    ],
    ids=["vocab_size", "max_len", "num_segments"],
)
def test_broken_rule_gives_the_value(fields, rule):
    assert list(bert.BertConfig(**fields).broken_rules()) == [rule]
