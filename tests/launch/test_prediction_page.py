"""The commands of the pages on data and prediction are ones that the programs know."""

import pathlib
import shlex

import pytest

from launch import command_line, predict, resolve
from launch.resolve import DeviceCount

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
        (["--text=a", "--batch_size=0"], "--batch_size=0 must be at least 1."),
        (["--text=a", "--top_k=0"], "--top_k=0 must be at least 1."),
    ],
)
def test_command_line_that_asks_for_nothing_is_an_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        predict.main(["--workdir=w", *arguments])

    assert message in capsys.readouterr().err
