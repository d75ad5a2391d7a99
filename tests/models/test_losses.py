import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.losses import cross_entropy, soft_cross_entropy

LOGITS = np.array([[1.0, -2.0, 0.5], [3.0, 3.0, 1.0]], np.float32)
TARGETS = np.array([2, 1], np.int32)


def reference(logits, targets):
    logits = logits.astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return -np.log(probabilities[np.arange(len(targets)), targets])


def test_cross_entropy_is_minus_the_logarithm_of_the_softmax():
    loss, _ = cross_entropy(jnp.array(LOGITS), jnp.array(TARGETS))
    np.testing.assert_allclose(loss, reference(LOGITS, TARGETS), rtol=1e-6)


def test_prediction_is_correct_if_no_class_scores_higher():
    _, correct = cross_entropy(jnp.array(LOGITS), jnp.array(TARGETS))
    assert correct.tolist() == [0.0, 1.0]


def test_gradient_of_cross_entropy_is_softmax_minus_target():
    gradient = jax.grad(lambda x: cross_entropy(x, jnp.array(TARGETS))[0].sum())(
        jnp.array(LOGITS)
    )
    expected = jax.nn.softmax(LOGITS) - np.eye(3)[TARGETS]
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


@pytest.mark.parametrize("shift", [-1e4, 1e4], ids=["very_low", "very_high"])
def test_cross_entropy_of_large_logits_is_finite(shift):
    loss, _ = cross_entropy(jnp.array(LOGITS + shift), jnp.array(TARGETS))
    np.testing.assert_allclose(loss, reference(LOGITS, TARGETS), rtol=1e-3)


def test_padding_of_the_lowest_float_takes_no_probability():
    lowest = np.full((2, 1), np.finfo(np.float32).min)
    padded = jnp.array(np.concatenate([LOGITS, lowest], axis=1, dtype=np.float32))
    loss, _ = cross_entropy(padded, jnp.array(TARGETS))
    np.testing.assert_allclose(loss, reference(LOGITS, TARGETS), rtol=1e-6)


def test_soft_cross_entropy_of_a_certain_target_is_cross_entropy():
    certain = jnp.array(np.eye(3, dtype=np.float32)[TARGETS])
    loss = soft_cross_entropy(jnp.array(LOGITS), certain)
    np.testing.assert_allclose(loss, reference(LOGITS, TARGETS), rtol=1e-6)


def test_soft_cross_entropy_of_a_mixture_is_the_mixture_of_losses():
    mixture = jnp.array([[0.3, 0.0, 0.7], [0.0, 1.0, 0.0]])
    loss = soft_cross_entropy(jnp.array(LOGITS), mixture)
    first, second = reference(LOGITS, np.array([0, 1])), reference(LOGITS, TARGETS)
    np.testing.assert_allclose(loss[0], 0.3 * first[0] + 0.7 * second[0], rtol=1e-6)
