"""From a published checkpoint to a run, and back."""

import json

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from launch import convert, resolve
from launch.checkpoint import Checkpointer
from models import published_config
from tests.models import cases

TO_SBP = ("--from=hf", "--to=sbp")
TO_HF = ("--from=sbp", "--to=hf")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A BERT as `transformers` has written it, with its tokenizer."""
    directory = tmp_path_factory.mktemp("bert")
    golden = cases.load("bert").golden
    (directory / "config.json").write_text(json.dumps(golden.config))
    (directory / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    save_file(golden.weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def imported(published, tmp_path_factory):
    """The run that begins with it."""
    directory = tmp_path_factory.mktemp("runs") / "bert"
    assert convert.main([*TO_SBP, str(published), str(directory)]) == 0
    return directory


def test_round_trip_gives_the_same_tensors(published, imported, tmp_path, capsys):
    target = tmp_path / "back"

    assert convert.main([*TO_HF, str(imported), str(target)]) == 0

    assert "bert of " in capsys.readouterr().out
    expected = load_file(published / "model.safetensors")
    found = load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes()
    config = json.loads((target / "config.json").read_text())
    assert (target / "tokenizer.json").is_file()
    assert config["architectures"] == ["BertForPreTraining"]
    assert config["hidden_size"] == 16


def test_run_has_the_config_of_the_checkpoint_and_its_tokenizer(published, imported):
    values = resolve.load(str(imported / "config.yaml"))

    assert values["model"]["num_layers"] == 4
    assert values["model"]["dropout_rate"] == 0.1
    assert values["data"]["tokenizer"] == str(published / "vocab.txt")
    saved = tokenizers.Tokenizer.from_file(str(imported / "tokenizer.json"))
    assert saved.token_to_id("[UNK]") == 1
    assert values["data"]["seq_length"] == 12
    with Checkpointer(imported / "checkpoints") as checkpointer:
        assert checkpointer.steps() == [0]
        assert checkpointer.read_extra()["num_samples"] == 0


def test_new_head_is_made_only_if_missing_ones_are_allowed(published, tmp_path, capsys):
    headless = tmp_path / "headless"
    headless.mkdir()
    (headless / "config.json").write_bytes((published / "config.json").read_bytes())
    tensors = load_file(published / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if name.startswith("bert.")}
    save_file(kept, headless / "model.safetensors")
    arguments = [*TO_SBP, str(headless), str(tmp_path / "run")]

    assert convert.main(arguments) == 1
    said = capsys.readouterr().err
    assert "7 missing:" in said
    assert "allow what is missing (--allow_missing)" in said
    assert not (tmp_path / "run").exists()

    assert convert.main([*arguments, "--allow_missing"]) == 0
    back = [*TO_HF, str(tmp_path / "run"), str(tmp_path / "back")]
    assert convert.main(back) == 0
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, value in tensors.items():
        assert (found[name].tobytes() == value.tobytes()) == (name in kept)
    assert np.std(found["cls.predictions.transform.dense.weight"]) > 0.01


def test_images_are_normalized_as_the_checkpoint_says(tmp_path):
    golden = cases.load("vit").golden
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(golden.config))
    save_file(golden.weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    said = {"image_mean": [0.4, 0.5, 0.5], "image_std": [0.2, 0.2, 0.3]}
    (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps(said))

    assert convert.main([*TO_SBP, str(tmp_path / "hf"), str(tmp_path / "run")]) == 0

    data = resolve.load(str(tmp_path / "run" / "config.yaml"))["data"]
    assert data["pixel_mean"] == said["image_mean"]
    assert data["pixel_std"] == said["image_std"]

    assert convert.main([*TO_HF, str(tmp_path / "run"), str(tmp_path / "back")]) == 0

    back = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert {name: back[name] for name in said} == said


@pytest.mark.parametrize("name", published_config.CLASSIFIERS)
def test_names_of_classes_go_there_and_back(name, tmp_path):
    golden = cases.load(name).golden
    num_classes = cases.load(name).config.num_classes
    labels = {str(number): f"class {number}" for number in range(num_classes)}
    values = {**golden.config, "id2label": labels}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    save_file(golden.weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})

    assert convert.main([*TO_SBP, str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert convert.main([*TO_HF, str(tmp_path / "run"), str(tmp_path / "back")]) == 0

    run = resolve.load(str(tmp_path / "run" / "config.yaml"))
    assert run["model"]["name"] == name
    assert run["data"]["classes"] == list(labels.values())
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["id2label"] == labels
    assert back["label2id"] == {label: int(i) for i, label in labels.items()}
    assert back["architectures"] == golden.config["architectures"]
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == golden.weights.keys()
    for key, value in golden.weights.items():
        assert found[key].tobytes() == value.tobytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TO_SBP, "{missing}", "{new}"], "holds no config.json"),
        ([*TO_SBP, "{published}", "{published}"], "is not empty. Name a new"),
        (
            [*TO_HF, "{published}", "{new}"],
            "holds no config.yaml. It seems to be in the format of Hugging Face: make",
        ),
        ([*TO_HF, "{missing}", "{new}"], "holds no config.yaml. Name the workdir"),
        ([*TO_HF, "{imported}", "{published}"], "is not empty. Name a new"),
        ([*TO_HF, "{imported}", "{new}", "--step=7"], "has no checkpoint of step 7"),
    ],
)
def test_what_cannot_be_converted_is_an_error(
    arguments, message, published, imported, tmp_path, capsys
):
    places = {
        "published": published,
        "imported": imported,
        "missing": tmp_path / "missing",
        "new": tmp_path / "new",
    }

    code = convert.main([argument.format(**places) for argument in arguments])

    assert code == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_target_that_is_a_file_is_an_error(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")

    for formats, source in ((TO_SBP, "hf"), (TO_HF, "run")):
        assert convert.main([*formats, source, str(tmp_path / "file")]) == 1
        assert "file' is a file. Name a new directory." in capsys.readouterr().err

    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TO_SBP, "--step=3"], "--step is for --from=sbp, not for --from=hf."),
        ([*TO_HF, "--config=a.py"], "--config is for --from=hf, not for --from=sbp."),
        ([*TO_HF, "--allow_missing"], "--allow_missing is for --from=hf, not for"),
    ],
)
def test_flag_of_the_other_direction_is_an_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        convert.main([*arguments, "a", "b"])
    assert message in capsys.readouterr().err


def test_same_format_twice_is_an_error(capsys):
    with pytest.raises(SystemExit):
        convert.main(["--from=hf", "--to=hf", "a", "b"])
    assert "--from and --to are both hf." in capsys.readouterr().err
