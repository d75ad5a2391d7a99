"""BERT with heads; that its numbers are those of `transformers` is in test_golden."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import MODELS, stacked
from models.bert import SIZES
from models.bert_heads import BertHeadConfig
from tests.models import cases

HEADS = ("bert_classifier", "bert_tagger")


def shapes_of(name, config):
    shapes = cases.stack(name, config).shapes
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return {stacked.path_of(path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("name", HEADS)
def test_all_but_the_head_has_the_paths_and_shapes_of_a_pretrained_bert(
    name, norm_position
):
    fields = dataclasses.asdict(SIZES["tiny"]) | {"norm_position": norm_position}
    pretrained = shapes_of("bert", MODELS["bert"].config(**fields))

    found = shapes_of(name, BertHeadConfig(**fields, num_classes=5))

    head = {"classifier/kernel": (128, 5), "classifier/bias": (5,)}
    assert {path: found[path] for path in head} == head
    assert found.items() - head.items() <= pretrained.items()
    left = {path.split("/")[0] for path in pretrained.keys() - found.keys()}
    pooler = {"pooler"} if name == "bert_tagger" else set()
    assert left == {"masked_lm", "next_sentence"} | pooler


@pytest.mark.parametrize(
    ("name", "num_params"),
    [("bert_classifier", 109_483_778), ("bert_tagger", 108_893_186)],
)
def test_parameters_are_as_many_as_those_published(name, num_params):
    fields = dataclasses.asdict(SIZES["base"]) | {"vocab_multiple": 1}
    config = BertHeadConfig(**fields)
    build = MODELS[name].module
    state = nnx.state(nnx.eval_shape(lambda: build(config, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == num_params


@pytest.mark.parametrize("name", HEADS)
def test_what_has_weight_zero_and_padding_do_not_count(name):
    case = cases.shallow(cases.load(name))

    @jax.jit
    def evaluate(batch):
        module = cases.module_of(case, case.params)
        x_BLD = module.encode(batch)
        return cases.objective(module, batch)[1], module.tallies(x_BLD, batch)

    weights = case.batch["weights"].at[3].set(0)
    batch = {**case.batch, "weights": weights}
    targets = batch["targets"].at[3].set(0).at[3, ..., -1].set(1)
    tokens = jnp.where(batch["is_token"], batch["tokens"], 7).at[3].set(2)
    changed = {**batch, "targets": targets, "tokens": tokens}

    jax.tree.map(np.testing.assert_array_equal, evaluate(changed), evaluate(batch))
    means, tallies = evaluate({**batch, "tokens": tokens.at[0].set(3)})
    assert means != evaluate(batch)[0]
    assert tallies["class_counts"][2].sum() == weights.sum()


def test_fewer_than_two_classes_are_an_error():
    (rule,) = BertHeadConfig(num_classes=1).broken_rules()
    assert rule == "num_classes=1 must be at least 2."
