"""The commands of docs/fine_tuning.md, on models that are smaller still."""

import json
import pathlib
import re
import shlex

import pytest

from launch import convert, merge_lora, train

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fine_tuning.md"
PROGRAMS = {"train": train, "merge_lora": merge_lora, "convert": convert}
STEPS = {
    "train.num_steps": 2,
    "train.global_batch_size": 8,
    "optim.warmup_steps": 0,
    "eval.num_batches": 1,
    "data.seq_length": 16,
}
SIZES = {
    "model.num_layers": 1,
    "model.model_dim": 16,
    "model.num_heads": 2,
    "model.mlp_dim": 32,
    "model.vocab_size": 300,
    "model.max_len": 16,
}


def commands():
    """Program and arguments of each command on the page."""
    found = re.findall(r"^    python -m launch\.(\w+) (.*)$", PAGE.read_text(), re.M)
    return [(program, shlex.split(arguments)) for program, arguments in found]


def write_data(folder):
    """Texts, and the same with labels."""
    texts = [f"The number is {n}. It is said {n} times.\nAgain {n}." for n in range(99)]
    rows = [{"text": text, "label": str(n % 3)} for n, text in enumerate(texts)]
    path = folder / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def shrink(arguments, data, cache_dir):
    """Arguments of `launch.train`, of a run of seconds."""
    config = re.search(r"configs/(\w+)\.py", arguments[0])[1]
    fields = STEPS | {"data.files": data, "data.cache_dir": cache_dir}
    if config.endswith("_tiny"):
        fields |= SIZES
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return [f"--config={ROOT}/configs/{config}.py", *arguments[1:], *overrides]


def test_page_names_every_way_to_begin():
    programs = [program for program, _ in commands()]
    assert programs.count("train") == 5
    assert {"merge_lora", "convert"} < set(programs)


@pytest.mark.slow  # compiles five models
def test_commands_of_the_page_run_in_their_order(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    data = write_data(tmp_path)

    for program, arguments in commands():
        is_training = program == "train"
        if is_training:
            arguments = shrink(arguments, data, tmp_path / "cache")
        assert PROGRAMS[program].main(arguments) == 0, capfd.readouterr().err
        begins = any("init_from" in argument for argument in arguments)
        assert ("begins with the" in capfd.readouterr().out) == (is_training and begins)

    assert (tmp_path / "published" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "again" / "checkpoints" / "2").is_dir()
