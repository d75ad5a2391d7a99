"""Whole runs of `launch.train`, on a small corpus and a smaller model."""

import json
import os
import pathlib
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from launch import train
from launch.metrics import read_metrics

NUM_STEPS = 12
LAYOUT = {"dist.data_parallel_size": 4, "dist.tensor_parallel_size": 2}
OTHER_LAYOUT = {
    "dist.data_parallel_size": 2,
    "dist.tensor_parallel_size": 2,
    "dist.pipeline_parallel_size": 2,
    "dist.pipeline_stage_layers": "(1,2)",
    "train.num_microbatches": 4,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with a text file of made-up sentences, and the cache of its tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    words = "the cat dog tree house sees likes has a red green old small big".split()

    def sentence():
        return " ".join(random.choice(words, size=8)).capitalize() + "."

    documents = ["\n".join(sentence() for _ in range(8)) for _ in range(60)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    return folder


@pytest.fixture(scope="module")
def launch(corpus):
    """Runs the command line on the corpus and returns the exit code."""
    fields = {
        "model.num_layers": 3,
        "model.model_dim": 32,
        "model.mlp_dim": 64,
        "model.vocab_size": 256,
        "model.dropout_rate": 0.1,
        "data.files": corpus / "text.txt",
        "data.cache_dir": corpus / "cache",
        "data.seq_length": 32,
        "data.validation_fraction": 0.2,
        "train.num_steps": NUM_STEPS,
        "train.global_batch_size": 16,
        "train.log_every": 1,
        "optim.learning_rate": 5e-3,
        "optim.warmup_steps": 2,
        "eval.every_steps": 6,
        "checkpoint.every_steps": 6,
    }

    def run(workdir, *flags, config="configs/bert_tiny.py", **overrides):
        given = overrides.pop("fields", {})
        named = fields | LAYOUT | given if config.endswith(".py") else given
        overrides = [f"--config.{name}={value}" for name, value in named.items()]
        return train.main(
            [f"--config={config}", f"--workdir={workdir}", *overrides, *flags]
        )

    return run


@pytest.fixture(scope="module")
def finished(launch, tmp_path_factory):
    """The workdir of a run that came to its end."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    assert launch(workdir, "--dump_hlo") == 0
    return workdir


def records_of(workdir, *, is_evaluation=False):
    records = read_metrics(workdir / "metrics.jsonl")
    return [r for r in records if ("eval_loss" in r) == is_evaluation]


def losses_of(workdir):
    return {record["step"]: record["loss"] for record in records_of(workdir)}


def copy_without_last_checkpoint(workdir, target):
    shutil.copytree(workdir, target)
    shutil.rmtree(target / "checkpoints" / str(NUM_STEPS))
    return target


def test_finished_run_leaves_config_metrics_checkpoints_and_picture(finished):
    names = {path.name for path in finished.iterdir()}

    assert names == {
        "checkpoints",
        "config.yaml",
        "loss.png",
        "metrics.jsonl",
        "tensorboard",
        "tokenizer.json",
        "train_step.hlo.txt",
    }
    saved = {path.name for path in (finished / "checkpoints").iterdir()}
    assert {"6", "12"} <= saved
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "HloModule" in (finished / "train_step.hlo.txt").read_text()


def test_loss_falls_and_every_logged_step_has_its_numbers(finished):
    records = records_of(finished)

    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    assert records[-1]["mlm_loss"] < records[0]["mlm_loss"] - 1
    wanted = (
        "loss mlm_loss nsp_loss learning_rate grad_norm tokens_per_second"
        " samples_per_second step_seconds utilization peak_memory_bytes"
    )
    for record in records:
        assert set(wanted.split()) <= set(record)
    evaluations = records_of(finished, is_evaluation=True)
    assert [record["step"] for record in evaluations] == [6, 12]
    assert {"eval_mlm_accuracy", "eval_nsp_accuracy"} <= set(evaluations[0])


def test_saved_config_repeats_the_run_bit_for_bit(launch, finished, tmp_path):
    config = str(finished / "config.yaml")

    assert launch(tmp_path / "again", config=config) == 0

    assert losses_of(tmp_path / "again") == losses_of(finished)


def test_resumed_run_is_the_run_that_never_stopped(launch, finished, tmp_path):
    workdir = copy_without_last_checkpoint(finished, tmp_path / "resumed")

    assert launch(workdir, "--resume") == 0

    assert losses_of(workdir) == losses_of(finished)


def test_run_resumes_on_another_layout_and_back(launch, finished, tmp_path):
    workdir = copy_without_last_checkpoint(finished, tmp_path / "moved")

    assert launch(workdir, "--resume", fields=OTHER_LAYOUT) == 0

    found, wanted = losses_of(workdir), losses_of(finished)
    assert found.keys() == wanted.keys()
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-4)
    # The checkpoint of the pipeline fits the first layout again.
    assert launch(workdir, "--eval_only") == 0


def test_evaluation_alone_prints_what_the_run_found(launch, finished, capfd):
    (last,) = [
        r for r in records_of(finished, is_evaluation=True) if r["step"] == NUM_STEPS
    ]

    assert launch(finished, "--eval_only") == 0

    line = capfd.readouterr().out.strip().splitlines()[-1]
    assert line.startswith(
        f"step {NUM_STEPS}  evaluation  loss {last['eval_loss']:.4f}"
    )


def test_signal_ends_the_run_with_a_checkpoint_to_go_on_from(
    launch, finished, tmp_path
):
    workdir = tmp_path / "stopped"

    def signal_after_three_steps():
        for _ in range(1200):
            time.sleep(0.05)
            if len(read_metrics(workdir / "metrics.jsonl")) >= 3:
                break
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signal_after_three_steps)
    thread.start()
    code = launch(workdir, fields={"train.num_steps": 10_000})
    thread.join()

    assert code == 128 + signal.SIGTERM
    last = max(losses_of(workdir))
    assert (workdir / "checkpoints" / str(last)).is_dir()
    fields = {"train.num_steps": last + 1}
    assert launch(workdir, "--resume", fields=fields) == 0
    assert max(losses_of(workdir)) == last + 1


def test_resuming_a_finished_run_says_that_nothing_is_left(launch, finished, capfd):
    assert launch(finished, "--resume") == 0

    line = capfd.readouterr().out.strip().splitlines()[-1]
    assert "step 12 is done, of train.num_steps=12: there is nothing left" in line


def test_run_that_goes_on_reads_other_text_by_its_tokenizer(
    launch, finished, corpus, tmp_path, capfd
):
    workdir, other = tmp_path / "run", tmp_path / "other.txt"
    shutil.copytree(finished, workdir)
    text = (corpus / "text.txt").read_text()
    other.write_text(text.replace("house", "giraffe"))

    assert launch(workdir, "--resume", fields={"data.files": other}) == 0

    kept, before = (f / "tokenizer.json" for f in (workdir, finished))
    assert kept.read_text() == before.read_text()
    said = capfd.readouterr().out
    changed = next(line for line in said.splitlines() if "changed since then" in line)
    assert "data.files" in changed
    assert "the contents of the data" in changed
    assert "data.tokenizer" not in changed


def test_diverging_run_names_the_step_and_keeps_the_last_good_checkpoint(
    launch, finished, tmp_path, capfd
):
    workdir = copy_without_last_checkpoint(finished, tmp_path / "diverged")

    code = launch(
        workdir, "--resume", fields={"optim.learning_rate": 1e38, "train.log_every": 3}
    )

    assert code == 1
    message = capfd.readouterr().err
    assert "error: The training diverged at step 8: loss nan" in message
    assert "the checkpoint of step 6 is kept" in message
    assert not (workdir / "checkpoints" / str(NUM_STEPS)).exists()
    assert launch(workdir, "--eval_only") == 0


def make_file_of(content):
    def make(folder):
        path = folder / "given.txt"
        path.write_bytes(content)
        return {"data.files": path}

    return make


BAD_DATA = {
    "missing": (lambda folder: {"data.files": folder / "no.txt"}, "no.txt"),
    "empty": (make_file_of(b""), "given.txt"),
    "binary": (make_file_of(b"a\0b" * 100), "given.txt"),
    "too small": (
        make_file_of(b"One. Two.\n\nThree. Four.\n"),
        "smaller than a sample",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_used_is_an_error_and_leaves_nothing(
    launch, tmp_path, capfd, name
):
    make, part = BAD_DATA[name]

    code = launch(tmp_path / "run", fields=make(tmp_path))

    message = capfd.readouterr().err
    assert code == 1
    assert message.startswith("error: ")
    assert part in message
    assert not (tmp_path / "run").exists()


def test_new_run_does_not_bury_an_old_one(launch, finished, capfd):
    before = (finished / "metrics.jsonl").read_bytes()

    assert launch(finished) == 1

    assert "already holds a run, with a checkpoint of step 12" in capfd.readouterr().err
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_resuming_without_a_checkpoint_is_an_error(launch, tmp_path, capfd):
    assert launch(tmp_path / "none", "--resume") == 1

    assert "There is no checkpoint in" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("flag", ["--eval_only", "--resume"])
def test_checkpoint_of_another_model_is_an_error(launch, finished, capfd, flag):
    saved = (finished / "config.yaml").read_text()

    code = launch(finished, flag, fields={"model.mlp_dim": 128})

    message = capfd.readouterr().err
    assert code == 1
    assert "is of another model or optimizer" in message
    assert "blocks/mlp/up/kernel" in message
    assert (finished / "config.yaml").read_text() == saved


def test_damaged_checkpoint_is_an_error(launch, finished, tmp_path, capfd):
    workdir = tmp_path / "damaged"
    shutil.copytree(finished, workdir)
    for path in (workdir / "checkpoints" / str(NUM_STEPS) / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(b"\0" * path.stat().st_size)

    assert launch(workdir, "--eval_only") == 1

    assert "error: " in capfd.readouterr().err


def test_workdir_that_cannot_be_made_is_an_error(launch, tmp_path, capfd):
    (tmp_path / "file").write_text("")

    assert launch(tmp_path / "file" / "run") == 1

    message = capfd.readouterr().err
    assert f"--workdir={tmp_path / 'file' / 'run'} cannot be written" in message
    assert "Name a folder that you may make or write." in message


def test_empty_workdir_is_an_error(launch, capfd):
    with pytest.raises(SystemExit):
        launch("")

    assert "it is empty. Write --workdir=runs/NAME." in capfd.readouterr().err


def test_wrong_fields_are_one_error(launch, tmp_path, capfd):
    fields = {"model.num_heads": 3, "optim.weight_decy": 1}

    assert launch(tmp_path / "run", fields=fields) == 1

    message = capfd.readouterr().err
    assert "optim.weight_decy: no such field. Did you mean 'weight_decay'?" in message
    assert "model.model_dim=32 is not divisible by num_heads=3" in message
    assert not (tmp_path / "run").exists()


def test_metrics_are_lines_of_json(finished):
    lines = pathlib.Path(finished / "metrics.jsonl").read_text().splitlines()

    assert all(isinstance(json.loads(line)["step"], int) for line in lines)


def test_trial_of_a_config_leaves_the_workdir_to_the_run(launch, tmp_path):
    for _ in range(2):
        assert launch(tmp_path, "--fast_dev_run") == 0

    assert [path.name for path in tmp_path.iterdir()] == ["fast_dev_run"]
    metrics = read_metrics(tmp_path / "fast_dev_run" / "metrics.jsonl")
    assert [row["step"] for row in metrics if "eval_loss" not in row][-1] == 2


def test_trial_does_not_go_on_from_a_checkpoint(launch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        launch(tmp_path, "--fast_dev_run", "--resume")

    assert "--fast_dev_run starts anew" in capsys.readouterr().err
