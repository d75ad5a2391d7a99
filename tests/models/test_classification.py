"""Sums of classifiers, against scikit-learn."""

import jax.numpy as jnp
import numpy as np
import pytest

from models import classification

metrics = pytest.importorskip("sklearn.metrics", reason="to compare with")


def draw(num_classes, num=50):
    r = np.random.default_rng(0)
    logits = r.standard_normal((num, num_classes)).astype(np.float32)
    labels = r.integers(num_classes, size=num)
    return logits, labels, (r.random(num) < 0.8).astype(np.float32)


@pytest.mark.parametrize("num_classes", [2, 5, 6, 9])
def test_accuracies_are_those_of_scikit_learn(num_classes):
    logits, labels, weights = draw(num_classes)
    targets = jnp.eye(num_classes)[labels]

    sums = classification.classification_sums(logits, targets, weights)
    counts = classification.classification_counts(targets, weights)

    assert sums.keys() == counts.keys()
    assert ("top5_accuracy" in sums) == (num_classes > 5)
    for k, name in ((1, "top1_accuracy"), (5, "top5_accuracy")):
        if name in sums:
            best = np.argsort(-logits, axis=1)[:, :k]
            expected = ((best == labels[:, None]).any(1) * weights).sum()
            assert sums[name] == expected
            if num_classes > 2:
                share = metrics.top_k_accuracy_score(
                    labels, logits, k=k, sample_weight=weights
                )
                assert sums[name] / counts[name] == pytest.approx(share)


@pytest.mark.parametrize("num_classes", [2, 9])
def test_counts_of_classes_are_those_of_the_confusion_matrix(num_classes):
    logits, labels, weights = draw(num_classes)

    found = classification.class_counts(logits, labels, weights)

    confusion = metrics.confusion_matrix(
        labels,
        logits.argmax(1),
        labels=np.arange(num_classes),
        sample_weight=weights,
    )
    expected = [np.diag(confusion), confusion.sum(0), confusion.sum(1)]
    np.testing.assert_array_equal(found, expected)


def test_counts_of_tokens_are_those_of_all_tokens_at_once():
    logits, labels, weights = draw(4, num=24)

    found = classification.class_counts(
        logits.reshape(4, 6, 4), labels.reshape(4, 6), weights.reshape(4, 6)
    )

    expected = classification.class_counts(logits, labels, weights)
    np.testing.assert_array_equal(found, expected)
