"""Command lines: those of the pages on data and prediction, and wrong ones."""

import pathlib
import shlex

import pytest

from launch import command_line, predict, resolve
from launch.resolve import DeviceCount
from tests.launch import trained_runs

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"


def commands(page, program):
    lines = (DOCS / page).read_text().splitlines()
    found = [line.strip() for line in lines if line.startswith("    python -m")]
    return [c for c in map(shlex.split, found) if c[2] == program]


def test_prediction_commands_can_be_read():
    found = [predict.parse(c[3:]) for c in commands("prediction.md", "launch.predict")]

    assert len(found) == 4
    assert all(options.text or options.inputs for options in found)


@pytest.mark.parametrize("name", ["bert_classifier", "bert_tagger"])
def test_training_commands_are_of_configs_that_resolve(name):
    [command] = [c for c in commands("data.md", "launch.train") if name in c[3]]

    options = command_line.parse(command[3:])
    config = resolve.resolve(
        resolve.load(options.config), options.overrides, DeviceCount(num_devices=1)
    )

    assert config.model_name == name
    assert config.data.files


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to predict. Name --inputs or give a --text."),
        (
            ["--text=a", "--global_batch_size=0"],
            "--global_batch_size=0 must be at least 1.",
        ),
        (["--text=a", "--top_k=0"], "--top_k=0 must be at least 1."),
    ],
)
def test_command_line_that_asks_for_nothing_is_an_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        predict.main(["--workdir=w", *arguments])

    assert message in capsys.readouterr().err


def test_model_of_the_next_token_is_referred_to_generation(tmp_path, capsys):
    trained_runs.make(tmp_path, tokenizer=trained_runs.byte_tokenizer())

    assert predict.main([f"--workdir={tmp_path}", "--text=def"]) == 1

    assert "It continues texts: use python -m launch.gener" in capsys.readouterr().err
