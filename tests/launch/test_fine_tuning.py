"""From a pre-trained run to adapters, and to a plain model again: whole runs."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch import convert, merge_lora, train
from launch.metrics import read_metrics

NUM_STEPS = 6
SIZES = {
    "model.num_layers": 3,
    "model.model_dim": 16,
    "model.num_heads": 2,
    "model.mlp_dim": 32,
    "model.vocab_size": 300,
    "model.max_len": 16,
}
LAYOUT = {
    "dist.data_parallel_size": 2,
    "dist.tensor_parallel_size": 2,
    "dist.pipeline_parallel_size": 2,
    "dist.pipeline_stage_layers": "(1,2)",
    "train.num_microbatches": 2,
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs the command line of `launch.train` and returns the exit code."""
    folder = tmp_path_factory.mktemp("text")
    text = "def add(a, b):\n    return a + b\n\n\n" * 4
    lines = [json.dumps({"text": f"# {n}\n{text}"}) for n in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    common = {
        "data.cache_dir": folder / "cache",
        "data.files": folder / "text.jsonl",
        "data.seq_length": 16,
        "data.validation_fraction": 0.2,
        "train.num_steps": NUM_STEPS,
        "train.global_batch_size": 8,
        "train.log_every": 1,
        "optim.learning_rate": 1e-2,
        "optim.warmup_steps": 1,
        "eval.every_steps": NUM_STEPS,
        "checkpoint.every_steps": 3,
        "dist.data_parallel_size": 8,
    }

    def run(config, workdir, *flags, **fields):
        fields = common | {name.replace("__", "."): v for name, v in fields.items()}
        overrides = [f"--config.{name}={value}" for name, value in fields.items()]
        file = f"--config=configs/{config}.py"
        return train.main([file, f"--workdir={workdir}", *overrides, *flags])

    return run


@pytest.fixture(scope="module")
def pretrained(launch, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "pretrained"
    assert launch("gpt2_tiny", workdir, **SIZES) == 0
    return workdir


@pytest.fixture(scope="module")
def adapted(launch, pretrained, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "adapted"
    assert launch("gpt2_lora", workdir, init_from=pretrained) == 0
    return workdir


def numbers_of(workdir, name):
    records = read_metrics(workdir / "metrics.jsonl")
    return {r["step"]: r[name] for r in records if name in r}


def test_adapters_go_on_from_where_the_run_ended(pretrained, adapted, capfd):
    before = numbers_of(pretrained, "eval_loss")[NUM_STEPS]
    losses, after = numbers_of(adapted, "loss"), numbers_of(adapted, "eval_loss")

    assert losses[1] < numbers_of(pretrained, "loss")[1] - 0.1
    assert losses[1] == pytest.approx(before, abs=0.3)
    assert after[NUM_STEPS] < before
    tokenizers = [w / "tokenizer.json" for w in (pretrained, adapted)]
    assert tokenizers[0].read_text() == tokenizers[1].read_text()


def test_resuming_needs_the_pretrained_run_no_more(
    launch, pretrained, adapted, tmp_path, capfd
):
    workdir = tmp_path / "resumed"
    shutil.copytree(adapted, workdir)
    shutil.rmtree(workdir / "checkpoints" / str(NUM_STEPS))
    gone = tmp_path / "gone"

    fields = {"init_from": gone, **LAYOUT}
    assert launch("gpt2_lora", workdir, "--resume", **fields) == 0

    assert "begins with" not in capfd.readouterr().out
    found, expected = numbers_of(workdir, "loss"), numbers_of(adapted, "loss")
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4)


def test_merged_run_computes_what_the_adapted_one_does(
    launch, adapted, tmp_path, capfd
):
    merged, exported = tmp_path / "merged", tmp_path / "exported"

    assert merge_lora.main([str(adapted), str(merged)]) == 0

    out = capfd.readouterr().out
    assert f"adapters of rank 8 merged, from {adapted}" in out
    assert launch("gpt2_tiny", merged, "--eval_only", **SIZES) == 0
    out = capfd.readouterr().out
    loss = float(out.split("evaluation")[1].split("loss ")[1].split()[0])
    assert loss == pytest.approx(numbers_of(adapted, "eval_loss")[NUM_STEPS], abs=1e-3)

    to_hf = ["--from=sbp", "--to=hf"]
    assert convert.main([*to_hf, str(merged), str(exported)]) == 0
    assert convert.main([*to_hf, str(adapted), str(tmp_path / "direct")]) == 0
    tensors = load_file(exported / "model.safetensors")
    direct = load_file(tmp_path / "direct" / "model.safetensors")
    assert tensors.keys() == direct.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(direct[name], value)
    assert not any("lora" in name for name in tensors)


def test_what_cannot_be_merged_is_an_error(pretrained, adapted, tmp_path, capfd):
    assert merge_lora.main([str(pretrained), str(tmp_path / "new")]) == 1
    assert "has no adapters, lora.rank=None. There is" in capfd.readouterr().err
    assert merge_lora.main([str(adapted), str(pretrained)]) == 1
    assert "is not empty. Name a new directory." in capfd.readouterr().err
    assert merge_lora.main([str(tmp_path), str(tmp_path / "new")]) == 1
    assert "holds no config.yaml. Name the workdir" in capfd.readouterr().err


def test_import_with_adapters_is_an_error(adapted, tmp_path, capfd):
    exported, config = tmp_path / "exported", tmp_path / "config.yaml"
    assert convert.main(["--from=sbp", "--to=hf", str(adapted), str(exported)]) == 0
    config.write_text("lora: {rank: 8}")
    arguments = ["--from=hf", "--to=sbp", f"--config={config}"]

    assert convert.main([*arguments, str(exported), str(tmp_path / "run")]) == 1

    assert "has adapters, lora.rank=8, of which" in capfd.readouterr().err
