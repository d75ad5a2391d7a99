"""Whole runs of `launch.train` of models other than BERT; `test_train` has the rest."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from launch import resolve, train
from launch.metrics import read_metrics

NUM_STEPS = 20
LAYOUT = {"dist.data_parallel_size": 4, "dist.tensor_parallel_size": 2}
OTHER_LAYOUT = {
    "dist.data_parallel_size": 2,
    "dist.tensor_parallel_size": 2,
    "dist.pipeline_parallel_size": 2,
    "dist.pipeline_stage_layers": "(1,2)",
    "train.num_microbatches": 2,
}
COMMON = {
    "model.num_layers": 3,
    "model.model_dim": 32,
    "model.mlp_dim": 64,
    "model.dropout_rate": 0.1,
    "train.num_steps": NUM_STEPS,
    "train.global_batch_size": 16,
    "train.log_every": 1,
    "optim.learning_rate": 5e-3,
    "optim.warmup_steps": 1,
    "eval.every_steps": 10,
    "eval.num_batches": 2,
    "checkpoint.every_steps": 10,
}
TEXT = {"model.vocab_size": 320, "data.seq_length": 32, "model.max_len": 32}
FIELDS = {
    "bert_classifier": {**TEXT, "optim.learning_rate": 1e-2},
    "bert_tagger": TEXT,
    "gpt2": TEXT,
    "vit": {"data.mixup_alpha": 0.2, "model.image_size": 16},
}
METRICS = {
    "bert_classifier": {"eval_top1_accuracy", "eval_macro_f1", "eval_top5_accuracy"},
    "bert_tagger": {"eval_tag_accuracy", "eval_macro_f1", "eval_micro_f1"},
    "gpt2": {"eval_loss", "eval_lm_loss", "eval_lm_accuracy", "eval_perplexity"},
    "vit": {"eval_loss", "eval_top1_accuracy", "eval_top5_accuracy"},
}


def write_text(folder):
    """Functions, all alike."""
    text = "def add(a, b):\n    return a + b\n\n\n" * 10
    lines = [json.dumps({"text": f"# {n}\n{text}"}) for n in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder / "text.jsonl"


def write_images(folder):
    """Dark and bright noise."""
    random = np.random.default_rng(0)
    for name, low in (("dark", 0), ("bright", 150)):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(60):
            pixels = random.integers(low, low + 100, (20, 16), np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    return folder / "images"


def write_labelled_texts(folder):
    """Texts of a word that is their class, and numbers."""
    texts = [f"w{n % 7} {n} " * 4 for n in range(300)]
    lines = [json.dumps({"text": t, "label": t.split()[0]}) for t in texts]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder / "texts.jsonl"


def write_tagged_words(folder):
    """Words whose class is their first letter."""
    random = np.random.default_rng(0)
    lines = [
        "\n".join(f"{w} {w[0]}" for w in random.choice(["an", "box", "cat"], 6)) + "\n"
        for _ in range(90)
    ]
    (folder / "words.conll").write_text("\n".join(lines))
    return folder / "words.conll"


CLASSES = {
    "bert_classifier": [f"w{n}" for n in range(7)],
    "bert_tagger": ["a", "b", "c"],
    "vit": ["bright", "dark"],
}
WRITERS = {
    "bert_classifier": write_labelled_texts,
    "bert_tagger": write_tagged_words,
    "gpt2": write_text,
    "vit": write_images,
}
# What is particular to these is their data and their head, which have their own tests.
SLOW = ("bert_classifier", "bert_tagger")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in FIELDS
    ],
)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def launch(name, tmp_path_factory):
    """Runs the command line and returns the exit code."""
    folder = tmp_path_factory.mktemp(name)
    given = {"data.cache_dir": folder / "cache", "data.files": WRITERS[name](folder)}

    def run(workdir, *flags, **layout):
        fields = COMMON | given | FIELDS[name] | LAYOUT | layout
        overrides = [f"--config.{field}={value}" for field, value in fields.items()]
        config = f"--config=configs/{name}_tiny.py"
        return train.main([config, f"--workdir={workdir}", *overrides, *flags])

    return run


@pytest.fixture(scope="module")
def finished(launch, tmp_path_factory):
    """The workdir of a run that came to its end."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    assert launch(workdir) == 0
    return workdir


def losses_of(workdir):
    records = read_metrics(workdir / "metrics.jsonl")
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def copy_without_last_checkpoint(workdir, target):
    shutil.copytree(workdir, target)
    shutil.rmtree(target / "checkpoints" / str(NUM_STEPS))
    return target


def test_run_learns_and_reports_what_its_model_is_judged_by(name, finished):
    losses = losses_of(finished)
    evaluations = [
        record
        for record in read_metrics(finished / "metrics.jsonl")
        if "eval_loss" in record
    ]

    assert list(losses) == list(range(1, NUM_STEPS + 1))
    assert [record["step"] for record in evaluations] == [10, 20]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"] - 0.1
    assert METRICS[name] <= set(evaluations[0])
    if name in CLASSES:
        saved = resolve.load(str(finished / "config.yaml"))
        assert saved["data"]["classes"] == CLASSES[name]
    if name == "gpt2":
        last = evaluations[-1]
        assert last["eval_perplexity"] == pytest.approx(np.exp(last["eval_loss"]))


def test_resumed_run_is_the_run_that_never_stopped(launch, finished, tmp_path):
    workdir = copy_without_last_checkpoint(finished, tmp_path / "resumed")

    assert launch(workdir, "--resume") == 0

    assert losses_of(workdir) == losses_of(finished)


def test_run_resumes_on_another_layout(launch, finished, tmp_path):
    workdir = copy_without_last_checkpoint(finished, tmp_path / "moved")

    assert launch(workdir, "--resume", **OTHER_LAYOUT) == 0

    found, wanted = losses_of(workdir), losses_of(finished)
    assert found.keys() == wanted.keys()
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-4)


def test_field_of_another_model_is_an_error(name, launch, tmp_path, capfd):
    assert launch(tmp_path / "run", **{"data.masking": "ngram"}) == 1

    message = f"data.masking='ngram' has no meaning for model.name='{name}'."
    assert message in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
