"""Adapters: what they compute, where they are, what of a model they leave alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sbp
from models import MODELS, lora, stacked
from models.lora import LoraConfig, LoraLinear
from models.sharding import match_rows
from tests.models import cases

TARGETS = (
    "blocks/*/attention/qkv",
    "blocks/*/attention/out",
    "blocks/*/mlp/up",
    "blocks/*/mlp/down",
)
CONFIG = LoraConfig(rank=2, alpha=6.0, targets=TARGETS)
SCALE = 3.0


def normals(seed, *shapes):
    r = np.random.default_rng(seed)
    return [r.standard_normal(shape).astype(np.float32) for shape in shapes]


def layer_of(kind):
    """A layer of inputs (2, 3) or 6, and outputs (4, 5) or 20, and its adapter."""
    rngs = nnx.Rngs(0)
    if kind == "linear":
        layer = nnx.Linear(6, 20, rngs=rngs)
    else:
        layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=rngs)
    return layer, LoraLinear(layer, rank=2, alpha=6.0, rngs=rngs)


def stack(name, config, adapters=CONFIG):
    """The pure functions of a model with adapters."""

    def build(rngs):
        return lora.adapt(MODELS[name].module(config, rngs=rngs), adapters, rngs=rngs)

    return stacked.stack(build)


@pytest.mark.parametrize("kind", ["linear", "general"])
def test_new_adapter_changes_nothing(kind):
    layer, adapted = layer_of(kind)
    (x,) = normals(0, (7, *adapted.lora_a.shape[:-1]))

    assert (np.asarray(adapted(x)) == np.asarray(layer(x))).all()
    assert 0 < np.std(adapted.lora_a[...]) < 1


@pytest.mark.parametrize("kind", ["linear", "general"])
def test_gradients_of_adapter_are_those_of_the_formula(kind):
    """Of ``y = x W + b + s (x A) B``: dA = s x' (dy B'), dB = s (x A)' dy."""
    _, adapted = layer_of(kind)
    in_dims = adapted.lora_a.shape[:-1]
    out_dims = adapted.lora_b.shape[1:]
    a, b, x, dy = normals(1, (6, 2), (2, 20), (7, 6), (7, 20))
    adapted.lora_a[...] = a.reshape(*in_dims, 2)
    adapted.lora_b[...] = b.reshape(2, *out_dims)
    graph, state = nnx.split(adapted)
    weights = nnx.to_pure_dict(state)
    given = jnp.asarray(x.reshape(7, *in_dims))

    def run(weights):
        return nnx.merge(graph, nnx.State(weights))(given)

    y, vjp = jax.vjp(run, weights)
    (found,) = vjp(jnp.asarray(dy.reshape(7, *out_dims)))

    kernel = np.asarray(weights["kernel"]).reshape(6, 20)
    bias = np.asarray(weights["bias"]).reshape(20)
    expected = x @ kernel + bias + SCALE * (x @ a) @ b
    np.testing.assert_allclose(y.reshape(7, 20), expected, rtol=1e-5, atol=1e-5)
    for name, value in {
        "lora_a": SCALE * x.T @ (dy @ b.T),
        "lora_b": SCALE * (x @ a).T @ dy,
        "kernel": x.T @ dy,
    }.items():
        np.testing.assert_allclose(
            found[name].reshape(value.shape), value, rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize("kind", ["linear", "general"])
def test_merged_layer_computes_the_same(kind):
    layer, adapted = layer_of(kind)
    adapted.lora_b[...] = normals(2, adapted.lora_b.shape)[0]
    (x,) = normals(3, (7, *adapted.lora_a.shape[:-1]))
    expected = np.asarray(adapted(x))

    merged = lora.merge(nnx.to_pure_dict(nnx.state(adapted)), SCALE)

    assert merged.keys() == {"kernel", "bias"}
    layer.kernel[...] = merged["kernel"]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_merging_goes_layer_by_layer_through_a_stack():
    (kernel, a, b) = normals(4, (3, 6, 4, 5), (3, 6, 2), (3, 2, 4, 5))
    tree = {"blocks": {"qkv": {"kernel": kernel, "lora_a": a, "lora_b": b}}}

    found = lora.merge(tree, SCALE)["blocks"]["qkv"]["kernel"]

    expected = kernel + SCALE * np.einsum("lir,lrjk->lijk", a, b)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def with_adapters(case, adapters=CONFIG):
    """The case with new adapters, whose other weights are as they were."""
    model = stack(case.name, case.config, adapters)
    return dataclasses.replace(
        case, model=model, params=join(case.params, model.init(jax.random.key(0)))
    )


def join(tree, other):
    """Nested dicts together; where both have a leaf, that of the first."""
    if not isinstance(other, dict):
        return tree
    return {n: join(tree[n], x) if n in tree else x for n, x in other.items()}


@pytest.mark.parametrize("name", ["bert_classifier", "gpt2"])
def test_model_begins_as_it_was(name):
    case = cases.shallow(cases.load(name))
    adapted = with_adapters(case)

    paths = {stacked.path_of(p) for p, _ in jax.tree.leaves_with_path(adapted.params)}
    assert {f"{target}/lora_a" for target in TARGETS} < paths
    before, _ = cases.stacked_objective(case, case.params)
    after, _ = cases.stacked_objective(adapted, adapted.params)
    assert float(after) == float(before)


def test_only_what_is_trained_has_gradients():
    case = with_adapters(cases.shallow(cases.load("bert_classifier")))
    heads = MODELS["bert_classifier"].heads
    model = dataclasses.replace(
        case.model, is_trained=lambda path: lora.is_trained(path, CONFIG, heads)
    )
    case = dataclasses.replace(case, model=model)

    grads = jax.grad(lambda params: cases.stacked_objective(case, params)[0])(
        case.params
    )

    moved = {
        stacked.path_of(path)
        for path, leaf in jax.tree.leaves_with_path(grads)
        if np.any(leaf)
    }
    # A itself has none as long as B is 0.
    assert moved == {f"{target}/lora_b" for target in TARGETS} | {
        "pooler/kernel",
        "pooler/bias",
        "classifier/kernel",
        "classifier/bias",
    }
    trained = {
        stacked.path_of(path)
        for path, _ in jax.tree.leaves_with_path(model.trained(grads))
    }
    assert trained == moved | {f"{target}/lora_a" for target in TARGETS}


def test_adapter_is_split_where_its_layer_is():
    config = cases.load("bert").config
    targets = (*TARGETS, "pooler")
    model = stack("bert", config, dataclasses.replace(CONFIG, targets=targets))
    rows = lora.with_rows(MODELS["bert"].rows(config), model.shapes)

    leaves = jax.tree.leaves_with_path(model.shapes)
    found = match_rows(rows, [stacked.path_of(path) for path, _ in leaves])

    assert {path: row for path, row in found.items() if "lora" in path} == {
        "blocks/*/attention/qkv/lora_a": {},  # (D, r)
        "blocks/*/attention/qkv/lora_b": {"tensor": sbp.split(2)},  # (r, 3, H, K)
        "blocks/*/attention/out/lora_a": {"tensor": sbp.split(0)},  # (H, K, r)
        "blocks/*/attention/out/lora_b": {},  # (r, D)
        "blocks/*/mlp/up/lora_a": {},
        "blocks/*/mlp/up/lora_b": {"tensor": sbp.split(1)},
        "blocks/*/mlp/down/lora_a": {"tensor": sbp.split(0)},
        "blocks/*/mlp/down/lora_b": {},
        "pooler/lora_a": {},
        "pooler/lora_b": {},
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank=0 must be at least 1."),
        ({"alpha": 0.0}, "alpha=0.0 must be above 0. Twice the rank is common."),
        ({"targets": ()}, "targets=() leaves rank=2 without a layer. Name layers"),
        (
            {"targets": ("blocks/0/mlp/up",)},
            "targets: 'blocks/0/mlp/up' picks out one block, but blocks are all alike.",
        ),
    ],
)
def test_config_that_cannot_be_is_an_error(fields, message):
    (problem,) = dataclasses.replace(CONFIG, **fields).broken_rules()

    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"targets": ("blocks/*/mlp/*", "blocks/*/mlp/wide")},
            "targets: 'blocks/*/mlp/wide' matches no layer. Linear layers:"
            " blocks/*/attention/out, blocks/*/attention/qkv, blocks/*/mlp/down,"
            " blocks/*/mlp/up, classifier, pooler.",
        ),
        (
            {"targets": ("blocks/*/mlp",)},
            "targets: 'blocks/*/mlp' matches 'blocks/*/mlp', a Mlp. Adapters are for",
        ),
        (
            {"targets": ("embeddings/norm",)},
            "targets: 'embeddings/norm' matches 'embeddings/norm', a LayerNorm.",
        ),
        (
            {"train_also": ("classifer/*", "pooler/*")},
            "train_also: 'classifer/*' matches no parameter. Heads have:"
            " classifier/bias, classifier/kernel, pooler/bias, pooler/kernel.",
        ),
    ],
)
def test_pattern_that_fits_nothing_is_an_error(fields, message):
    family = MODELS["bert_classifier"]
    config = cases.load("bert_classifier").config
    model = nnx.eval_shape(lambda: family.module(config, rngs=nnx.Rngs(0)))

    (problem,) = lora.problems(
        model, dataclasses.replace(CONFIG, **fields), family.heads
    )

    assert problem.startswith(message)
    assert list(lora.problems(model, CONFIG, family.heads)) == []


def test_layer_over_other_dims_than_the_last_has_no_adapter():
    layer = nnx.LinearGeneral((2, 3), 4, axis=(0, -1), rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"LinearGeneral maps the dims \(0, -1\)"):
        LoraLinear(layer, rank=2, alpha=1.0, rngs=nnx.Rngs(0))
