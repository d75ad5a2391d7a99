"""What evaluation reports is exact: the same for all batch sizes and layouts.

It is compared with what scikit-learn makes of all predictions at once.
"""

import functools
import json
import types

import jax
import numpy as np
import pytest

from launch import distributed, job, loop, resolve, scores, state, step
from launch.resolve import DeviceCount

metrics = pytest.importorskip("sklearn.metrics", reason="to compare with")

NUM_HELD_OUT = 50  # no batch size here divides it
NUM_CLASSES = {"bert_classifier": 7, "bert_tagger": 4}
SIZES = {"num_layers": 2, "model_dim": 16, "num_heads": 2, "mlp_dim": 16}
LAYOUTS = {  # data, tensor, stage, context, microbatches
    "one": (1, 1, 1, 1, 1),
    "dp2_tp2": (2, 2, 1, 1, 1),
    "tp2_pp2": (1, 2, 2, 1, 3),
    "cp2": (1, 1, 1, 2, 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random words with random labels, some of them rare."""
    folder = tmp_path_factory.mktemp("eval")
    r = np.random.default_rng(0)
    for name, size in (("train", 20), ("held_out", NUM_HELD_OUT)):
        texts = [
            [f"{number}", *r.choice(list("abcdefgh"), size=r.integers(2, 9))]
            for number in range(size)
        ]
        files = {
            "bert_classifier": [
                {"text": " ".join(text), "label": draw(r, 7, ())} for text in texts
            ],
            "bert_tagger": [
                {"words": text, "labels": draw(r, 4, len(text))} for text in texts
            ],
        }
        for family, records in files.items():
            lines = "\n".join(map(json.dumps, records))
            (folder / f"{family}_{name}.jsonl").write_text(lines)
    return folder


def draw(r, num_classes, shape):
    """Labels of which the last ones are rare."""
    labels = np.minimum(r.exponential(1.5, shape).astype(int), num_classes - 1)
    return labels.tolist()


@pytest.fixture(scope="module")
def open_job(folder):
    """Returns the job of a model, a batch size and a layout."""

    @functools.cache
    def open_job(name, size, layout="one"):
        data, tensor, stage, context, num_microbatches = LAYOUTS[layout]
        values = {
            "model": {
                "name": name,
                "vocab_size": 64,
                "max_len": 16,
                "num_classes": NUM_CLASSES[name],
                "init_scale": 1.0,  # so that scores are far from each other
                **SIZES,
            },
            "data": {
                "files": (str(folder / f"{name}_train.jsonl"),),
                "validation_files": (str(folder / f"{name}_held_out.jsonl"),),
                "classes": tuple(map(str, range(NUM_CLASSES[name]))),
                "cache_dir": str(folder / "cache"),
                "seq_length": 16,
            },
            "train": {"global_batch_size": size, "num_microbatches": num_microbatches},
            "dist": {
                "data_parallel_size": data,
                "tensor_parallel_size": tensor,
                "pipeline_parallel_size": stage,
                "context_parallel_size": context,
            },
        }
        devices = DeviceCount(num_devices=data * tensor * stage * context)
        config = resolve.resolve(values, {}, devices)
        return job.build(config, distributed.create_mesh(config.dist, devices))

    return open_job


@pytest.fixture(scope="module")
def params_of(open_job):
    """Returns the same random weights for all layouts."""

    @functools.cache
    def params_of(name):
        built = open_job(name, NUM_HELD_OUT)
        model = built.steps.model
        return jax.device_get(jax.jit(model.init)(jax.random.key(1)))

    return params_of


@pytest.fixture(scope="module")
def expected(open_job, params_of):
    """Returns what scikit-learn says of all predictions."""

    @functools.cache
    def expected(name):
        built = open_job(name, NUM_HELD_OUT)
        [batch] = built.data.validation_batches()
        program = step.build_output_step(
            built.steps, lambda model, x, _: model.logits(x)
        )
        logits = np.asarray(program(params_of(name), batch))
        counted, labels = batch["weights"] > 0, batch["targets"]
        labels = labels.argmax(-1) if name == "bert_classifier" else labels[counted]
        return scores_of(logits[counted], labels)

    return expected


def scores_of(logits, labels):
    best = logits.argmax(-1)
    f1 = {
        f"{kind}_f1": metrics.f1_score(labels, best, average=kind, zero_division=0)
        for kind in ("macro", "micro")
    }
    if logits.shape[-1] == 4:
        return {"tag_accuracy": metrics.accuracy_score(labels, best), **f1}
    top = {
        f"top{k}_accuracy": metrics.top_k_accuracy_score(
            labels, logits, k=k, labels=np.arange(7)
        )
        for k in (1, 5)
    }
    return top | f1


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    [
        ("bert_classifier", 3, "one"),
        ("bert_classifier", 7, "one"),
        ("bert_classifier", 64, "one"),
        ("bert_classifier", 6, "dp2_tp2"),
        ("bert_classifier", 7, "cp2"),
        ("bert_tagger", 7, "cp2"),
        ("bert_tagger", 7, "one"),
        ("bert_tagger", 6, "tp2_pp2"),
    ],
)
def test_scores_are_those_of_all_predictions_at_once(
    name, size, layout, open_job, params_of, expected
):
    built = open_job(name, size, layout)
    assert built.data.num_validation_samples == NUM_HELD_OUT
    assert NUM_HELD_OUT % size
    params = jax.device_put(params_of(name), built.steps.shardings.params)

    found = loop.evaluate(
        built, built.compile_eval_step(), types.SimpleNamespace(params=params)
    )

    wanted = expected(name)
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, abs=1e-12)
    assert 0.05 < wanted["macro_f1"] != wanted["micro_f1"] < 1
    [loss] = [key for key in found if key.endswith("_loss")]
    assert found.keys() == wanted.keys() | {"loss", loss}
    assert found["loss"] == found[loss] > 0.1


@pytest.mark.parametrize("num_classes", [2, 3, 40])
def test_f1_is_that_of_scikit_learn(num_classes):
    r = np.random.default_rng(num_classes)
    labels, found = r.integers(num_classes, size=(2, 30))  # of 40, some are in neither
    confusion = metrics.confusion_matrix(labels, found, labels=np.arange(num_classes))
    counts = np.stack([np.diag(confusion), confusion.sum(0), confusion.sum(1)])

    actual = scores.f1({}, {"class_counts": counts})

    for kind in ("macro", "micro"):
        wanted = metrics.f1_score(labels, found, average=kind, zero_division=0)
        assert actual[f"{kind}_f1"] == pytest.approx(wanted)
    assert ("f1" in actual) == (num_classes == 2)
    if num_classes == 2:
        assert actual["f1"] == pytest.approx(metrics.f1_score(labels, found))


def test_training_step_does_not_count_classes(open_job):
    built = open_job("bert_classifier", 6)
    abstract = built.abstract_state

    _, found = jax.eval_shape(
        step.build_train_step(built.steps), abstract, built.abstract_batch
    )

    assert isinstance(abstract, state.TrainState)
    assert "class_counts" not in found
    assert all(value.shape == () for value in found.values())
