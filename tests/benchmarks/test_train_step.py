import json
import math
import pydoc_data.topics

import numpy as np
import pytest

from benchmarks import pipeline, train_step
from launch import resolve
from launch.flops import bert_train_flops
from launch.resolve import DeviceCount
from models.bert import BertConfig

SIZES = {"num_layers": 1, "model_dim": 32, "mlp_dim": 64, "num_heads": 2}


@pytest.fixture
def arguments(tmp_path):
    """A model that compiles fast, on a few pages of text."""
    pages = list(pydoc_data.topics.topics.values())[:20]
    (tmp_path / "text.txt").write_text("\n\n".join(pages))
    fields = {
        **{f"model.{name}": size for name, size in SIZES.items()},
        "model.vocab_size": 512,
        "model.max_len": 32,
        "data.files": tmp_path / "text.txt",
        "data.cache_dir": tmp_path / "cache",
        "data.seq_length": 32,
        "train.global_batch_size": 8,
        "dist.data_parallel_size": 8,
    }
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["--config=configs/bert_tiny.py", *overrides]


@pytest.mark.slow
def test_record_says_what_was_measured(arguments, capsys):
    train_step.main([*arguments, "--num_runs=3"])
    *table, line = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["layout"] == "dp8_tp1_pp1"
    assert record["step_num_runs"] == record["bare_step_num_runs"] == 3
    step, bare = record["step_seconds_median"], record["bare_step_seconds_median"]
    assert record["step_over_bare_step"] == pytest.approx(step / bare)
    assert record["tokens_per_second"] == pytest.approx(8 * 32 / step)
    config = BertConfig(vocab_size=512, max_len=32, **SIZES)
    expected = bert_train_flops(config, seq_length=32, num_predicted=5, num_samples=8)
    assert record["model_flops"] == expected
    share = expected / step / record["peak_flops_per_second"]
    assert record["utilization"] == pytest.approx(share)
    assert any("step / bare step" in row for row in table)


@pytest.mark.parametrize("benchmark", [train_step, pipeline], ids=["step", "pipeline"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=nowhere.py"], "--config=nowhere.py: there is no such file"),
        (["--config=configs/bert_tiny.py", "--num_runs=0"], "'0' is not a whole"),
        (
            ["--config=configs/bert_tiny.py", "--config.train.num_steps=0"],
            "train.num_steps=0 must be at least 1",
        ),
    ],
    ids=["no file", "no runs", "broken rule"],
)
def test_wrong_command_is_one_message(benchmark, arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(arguments)

    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_bare_step_trains():
    config = resolve.resolve(
        {"model": {"name": "bert", **SIZES, "vocab_size": 128, "dropout_rate": 0.1}},
        {"train.global_batch_size": "2", "optim.learning_rate": "0.01"},
        DeviceCount(num_devices=1),
    )
    stepper = train_step.make_bare_step(config, make_batch())
    losses = [float(stepper()[0]["mlm_loss"]) for _ in range(10)]
    assert losses[0] == pytest.approx(math.log(128), rel=0.05)
    assert losses[-1] < 0.5 * losses[0]


def make_batch():
    """Two samples whose tokens are all the same."""
    length, num_predicted = 8, 2
    ones = np.ones((2, length), np.int32)
    return {
        "tokens": ones,
        "segments": 0 * ones,
        "is_token": ones > 0,
        "positions": ones[:, :num_predicted],
        "targets": ones[:, :num_predicted],
        "weights": np.ones((2, num_predicted), np.float32),
        "is_random_next": np.ones(2, np.int32),
        "sample_weights": np.ones(2, np.float32),
    }


def test_an_argument_that_is_no_override_is_refused(capsys):
    with pytest.raises(SystemExit):
        train_step.main(["--config=configs/bert_tiny.py", "--steps=3"])
    assert "--steps=3: expected --config.SECTION.FIELD=VALUE" in capsys.readouterr().err
