import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.vit import SIZES, PatchEmbedding, Vit, VitConfig
from tests.models import cases

SMALL = dataclasses.replace(cases.load("vit").config, num_layers=1)


def count(config):
    state = nnx.state(nnx.eval_shape(lambda: Vit(config, rngs=nnx.Rngs(0))))
    return sum(leaf.size for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("size", "num_params"),
    [
        ("ti16", 5_717_416),
        ("s16", 22_050_664),
        ("s32", 22_878_952),
        ("b16", 86_567_656),
        ("b32", 88_224_232),
        ("l16", 304_326_632),
        ("l32", 306_535_400),
        ("h14", 632_045_800),
    ],
)
def test_parameters_are_as_many_as_those_published(size, num_params):
    assert count(SIZES[size]) == num_params


@pytest.mark.parametrize("size", SIZES)
def test_patch_size_is_in_the_name_and_the_epsilon_is_that_of_the_paper(size):
    config = SIZES[size]
    assert str(config.patch_size) == size.lstrip("tisblh")
    assert config.norm_epsilon == 1e-6
    assert config.seq_length == (224 // config.patch_size) ** 2 + 1


def test_mean_pooling_has_no_class_token():
    config = dataclasses.replace(SIZES["b16"], pooling="mean")
    assert count(config) == count(SIZES["b16"]) - 2 * 768
    assert config.seq_length == 196


def test_patches_are_embedded_row_by_row_as_by_a_convolution():
    config = dataclasses.replace(SMALL, pooling="mean", image_size=12)
    embedding = PatchEmbedding(config, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(0), (2, 12, 12, 3))
    actual = jax.jit(embedding)(images)
    expected = jax.lax.conv_general_dilated(
        images,
        embedding.kernel[...],
        window_strides=(4, 4),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ).reshape(2, 9, 16)
    expected += embedding.position[...][None]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_mean_pooling_averages_the_normalized_patches():
    model = Vit(dataclasses.replace(SMALL, pooling="mean"), rngs=nnx.Rngs(0))
    x_BLD = jax.random.normal(jax.random.key(0), (2, 4, 16))
    permuted = x_BLD[:, ::-1]
    logits, same = jax.jit(lambda x, y: (model.logits(x), model.logits(y)))(
        x_BLD, permuted
    )
    np.testing.assert_allclose(logits, same, atol=1e-6)
    mean = np.asarray(x_BLD - x_BLD.mean(-1, keepdims=True))
    mean = (mean / np.sqrt((mean**2).mean(-1, keepdims=True) + 1e-12)).mean(1)
    np.testing.assert_allclose(logits, mean @ model.classifier.kernel, atol=1e-6)


def test_accuracies_count_the_best_and_the_five_best_classes():
    case = cases.load("vit")
    module = cases.module_of(case, case.params)
    logits = jnp.array([[5, 4, 3, 2, 1, 0, -1]] * 4, jnp.float32)
    targets = jnp.eye(7)[jnp.array([0, 4, 5, 0])].at[3].set([0.6, 0.4, 0, 0, 0, 0, 0])
    weights = jnp.array([1.0, 1.0, 1.0, 0.0])
    # The classifier alone decides: it reads the logits off the normalized class token.
    module.logits = lambda x_BLD: logits
    sums = module.losses(None, {"targets": targets, "weights": weights})
    assert sums["top1_accuracy"] == 1
    assert sums["top5_accuracy"] == 2
    assert sums["classification_loss"] == pytest.approx(
        3 * jax.nn.logsumexp(logits[0]) - (5 + 1 + 0)
    )
    counts = module.counts({"targets": targets, "weights": weights})
    assert set(map(float, counts.values())) == {3.0}
    assert counts.keys() == sums.keys()


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            {"image_size": 225},
            "image_size=225 is not divisible by patch_size=16. Resize the images",
        ),
        ({"pooling": "max"}, "pooling='max' is not one of 'class_token', 'mean'."),
        ({"num_classes": 0}, "num_classes=0 must be at least 1."),
        ({"norm_position": "post"}, "norm_position='post' is not one of 'pre'."),
    ],
    ids=["image_size", "pooling", "num_classes", "norm_position"],
)
def test_broken_rule_gives_the_values(fields, rule):
    (sentence,) = VitConfig(**fields).broken_rules()
    assert sentence.startswith(rule)
