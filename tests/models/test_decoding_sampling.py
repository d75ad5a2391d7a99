"""Tokens are drawn from the distribution that the fields describe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import sampling
from models.sampling import SamplingConfig

LOGITS = np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32) * 2
SEEN = np.random.default_rng(1).random((3, 10)) < 0.4


def numpy_probabilities(logits, config, seen):
    """The distribution of one row, by the definitions."""
    logits = logits.astype(np.float64)
    penalty = config.repetition_penalty
    lower = np.where(logits > 0, logits / penalty, logits * penalty)
    logits = np.where(seen, lower, logits) / config.temperature
    order = np.argsort(-logits)
    kept = order[: config.top_k or len(order)]
    probs = np.exp(logits[kept] - logits.max())
    probs /= probs.sum()
    num_kept = 1
    while probs[:num_kept].sum() < config.top_p and num_kept < len(kept):
        num_kept += 1
    full = np.zeros(len(logits))
    full[kept[:num_kept]] = probs[:num_kept] / probs[:num_kept].sum()
    return full


CONFIGS = [
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.5),
    SamplingConfig(temperature=2.0, top_k=3),
    SamplingConfig(temperature=1.0, top_k=1),
    SamplingConfig(temperature=1.0, top_p=0.8),
    SamplingConfig(temperature=1.0, top_p=1e-6),
    SamplingConfig(temperature=1.3, top_k=6, top_p=0.7),
    SamplingConfig(temperature=1.0, repetition_penalty=1.5),
    SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=0.6),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_distribution_is_that_of_the_definitions(config):
    assert list(config.broken_rules()) == []
    logits = sampling.process(jnp.asarray(LOGITS), config, jnp.asarray(SEEN))

    expected = [
        numpy_probabilities(row, config, seen)
        for row, seen in zip(LOGITS, SEEN, strict=True)
    ]
    np.testing.assert_allclose(jax.nn.softmax(logits), expected, rtol=1e-5, atol=1e-7)
    assert ((np.asarray(logits) == -np.inf) == (np.array(expected) == 0)).all()


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]], ids=repr)
def test_tokens_are_drawn_as_often_as_they_are_probable(config):
    num_draws = 20_000
    keys_B = jax.random.split(jax.random.key(0), num_draws)
    logits_BV = jnp.broadcast_to(jnp.asarray(LOGITS[:1]), (num_draws, 10))
    seen_BV = jnp.broadcast_to(jnp.asarray(SEEN[:1]), (num_draws, 10))

    drawn = sampling.choose(logits_BV, config, keys_B=keys_B, seen_BV=seen_BV)

    expected = numpy_probabilities(LOGITS[0], config, SEEN[0])
    found = np.bincount(drawn, minlength=10) / num_draws
    deviation = np.sqrt(expected * (1 - expected) / num_draws)
    assert (np.abs(found - expected) <= 4 * deviation).all()
    assert (found[expected == 0] == 0).all()


def test_draw_depends_on_the_key_and_the_row_alone():
    config = SamplingConfig(temperature=1.0, top_p=0.9)
    keys_B = jax.random.split(jax.random.key(7), 3)
    whole = sampling.choose(jnp.asarray(LOGITS), config, keys_B=keys_B, seen_BV=None)
    order = jnp.array([2, 0, 1])
    moved = sampling.choose(
        jnp.asarray(LOGITS)[order], config, keys_B=keys_B[order], seen_BV=None
    )
    np.testing.assert_array_equal(moved, whole[order])


def test_best_token_is_taken_after_the_penalty():
    logits = jnp.array([[1.0, 3.0, 2.0], [-1.0, -3.0, -1.5]])
    seen = jnp.array([[False, True, False], [True, False, False]])
    for penalty, expected in ((1.0, [1, 0]), (2.0, [2, 2])):
        config = SamplingConfig(repetition_penalty=penalty)
        found = sampling.choose(logits, config, keys_B=None, seen_BV=seen)
        assert found.tolist() == expected


def test_tokens_equal_to_the_last_that_stays_stay_too():
    ties = jnp.array([[1.0, 2.0, 2.0, 0.0]])
    assert sampling.keep_top_k(ties, 1).tolist() == [[-jnp.inf, 2.0, 2.0, -jnp.inf]]
    assert sampling.keep_top_p(ties, 0.1).tolist() == [[-jnp.inf, 2.0, 2.0, -jnp.inf]]


def test_every_field_has_a_processor():
    fields = SamplingConfig.__dataclass_fields__
    assert set(sampling.PROCESSORS) == set(fields)
    assert {name: p.unused for name, p in sampling.PROCESSORS.items()} == {
        name: field.default for name, field in fields.items()
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.5}, "temperature=-0.5 must be at least 0."),
        ({"temperature": float("nan")}, "temperature=nan must be at least 0."),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0 must be at least 1."),
        (
            {"temperature": 1.0, "top_p": 0.0},
            "top_p=0.0 must be above 0 and at most 1. Use 1 to draw from all tokens.",
        ),
        (
            {"temperature": 1.0, "top_p": 1.5},
            "top_p=1.5 must be above 0 and at most 1. Use 1 to draw from all tokens.",
        ),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty=0.0 must be above 0. Use 1 for none, and more to repeat"
            " less.",
        ),
        (
            {"top_k": 5},
            "top_k=5 has no meaning at temperature=0, which takes the best token. Set a"
            " temperature, such as 1.0.",
        ),
    ],
)
def test_wrong_field_is_named(fields, message):
    assert list(SamplingConfig(**fields).broken_rules()) == [message]
