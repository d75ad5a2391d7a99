"""Texts to pre-train on whose held-out part is in files of its own."""

import json

import numpy as np
import pytest

from launch import families, resolve
from launch.resolve import DeviceCount

SIZES = {
    "model.num_layers": "1",
    "model.model_dim": "8",
    "model.num_heads": "1",
    "model.mlp_dim": "8",
    "model.vocab_size": "300",
    "model.max_len": "32",
    "data.seq_length": "32",
    "train.global_batch_size": "4",
}


def write(path, numbers):
    """Documents of three sentences, told apart by a number."""
    documents = [
        f"The number is {n}. It is said {n} times.\nNobody knows why {n} it is."
        for n in numbers
    ]
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    return path


@pytest.fixture
def build(tmp_path):
    """Builds the data of a model, of files to train on and others to hold out."""
    files = write(tmp_path / "train.jsonl", range(100, 160))
    others = write(tmp_path / "others.jsonl", range(150, 180))

    def make(name, **fields):
        given = SIZES | {
            "model.name": name,
            "data.files": str(files),
            "data.validation_files": str(others),
            "data.cache_dir": str(tmp_path / "cache"),
            **{f"data.{field}": str(value) for field, value in fields.items()},
        }
        config = resolve.resolve({}, given, DeviceCount(num_devices=1))
        return families.build(config)

    return make


def without_masks(batch):
    """The tokens of a batch, with those that are to be predicted in their places."""
    tokens = batch["tokens"].copy()
    if "positions" in batch:
        rows, places = np.nonzero(batch["weights"])
        columns = batch["positions"][rows, places]
        tokens[rows, columns] = batch["targets"][rows, places]
    return tokens


def numbers_in(pipeline, batches):
    """The numbers of the documents of some batches."""
    rows = [row for batch in batches for row in without_masks(batch)]
    texts = [pipeline.tokenizer.decode(row.tolist()) for row in rows]
    words = "".join(c if c.isdigit() else " " for text in texts for c in text).split()
    return {int(word) for word in words if len(word) == 3}


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_held_out_are_all_of_these_files_and_training_has_none_of_them(name, build):
    data = build(name)

    batches = data.train_batches()
    trained = numbers_in(data, [next(batches) for _ in range(60)])
    batches.close()
    held_out = numbers_in(data, data.validation_batches())

    assert held_out & set(range(160, 180))
    assert held_out <= set(range(150, 180))
    assert len(trained) > 30
    assert trained <= set(range(100, 150))
    assert "50 documents to train on" in data.summary()
    assert "30 documents held out" in data.summary()


def test_other_held_out_files_are_other_data(build, tmp_path):
    one = build("gpt2")
    another = write(tmp_path / "more.jsonl", range(200, 210))
    other = build("gpt2", validation_files=another)

    assert one.fingerprint != other.fingerprint
    assert np.array_equal(other.splits.train.documents.shape, (60,))


def test_files_that_are_not_there_are_an_error(build):
    with pytest.raises(FileNotFoundError, match=r"data.validation_files names 1 of 1"):
        build("bert", validation_files="none.jsonl")
    with pytest.raises(ValueError, match="has no meaning beside data.validation_files"):
        build("gpt2", validation_fraction=0.2)
