"""Command lines: those of the pages on data and prediction, and wrong ones."""

import pathlib
import shlex

import pytest
import tokenizers

from launch import command_line, predict, resolve
from launch.data import tokenizer
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


def test_output_is_as_before_after_an_error(tmp_path, capsys):
    ids = {token: i for i, token in enumerate(tokenizer.SPECIAL_TOKENS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    model = {"name": "bert_classifier", **trained_runs.SIZES, "vocab_size": 24}
    run = tmp_path / "run"
    trained_runs.make(run, model={**model, "num_classes": 2}, tokenizer=words)
    output = tmp_path / "out" / "records.jsonl"
    output.parent.mkdir()
    output.write_text("of an earlier call")
    (tmp_path / "bad.jsonl").write_text('{"text": "the cat"}\n{broken\n')
    (tmp_path / "blank.txt").write_text("\n \n")

    for name, message in (
        ("bad.jsonl", "bad.jsonl:2: not JSON"),
        ("blank.txt", "blank.txt holds nothing to predict, only blank lines or"),
    ):
        command = [f"--workdir={run}", f"--output={output}", "--inputs"]
        assert predict.main([*command, str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err

    assert output.read_text() == "of an earlier call"
    assert list(output.parent.iterdir()) == [output]


def test_output_that_cannot_be_written_is_an_error_at_once(tmp_path, capsys):
    for path, message in (
        (tmp_path, f"--output={tmp_path} is a folder. Name a file in it."),
        (tmp_path / "no" / "a", f"there is no folder '{tmp_path / 'no'}'. Make it"),
    ):
        assert predict.main(["--workdir=w", "--text=a", f"--output={path}"]) == 1
        assert message in capsys.readouterr().err


def test_model_of_the_next_token_is_referred_to_generation(tmp_path, capsys):
    trained_runs.make(tmp_path, tokenizer=trained_runs.byte_tokenizer())

    assert predict.main([f"--workdir={tmp_path}", "--text=def"]) == 1

    assert "It continues texts: use python -m launch.gener" in capsys.readouterr().err
