"""Rows of a corpus whose documents are known character for character."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from launch import gpt2_data
from launch.data import byte_bpe, tokenizer, whole_texts
from launch.run_config import DataConfig
from models.gpt2 import Gpt2Config

LENGTH = 16
END = whole_texts.END_OF_TEXT
TEXTS = [
    f"def f{n}():\n\treturn '{'é→' * (n % 5)}{n}'\n" * (1 + n % 4) for n in range(40)
]
MODEL = Gpt2Config(vocab_size=300)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return DataConfig(
        files=(str(folder / "texts.jsonl"),),
        cache_dir=str(folder / "cache"),
        seq_length=LENGTH,
        validation_fraction=0.2,
    )


@pytest.fixture(scope="module")
def splits(data):
    return gpt2_data.open_splits(data, MODEL, 5)


def rows_of(samples):
    rows = np.arange(len(samples))
    return samples.make(rows, rows)


def texts_of(splits, samples):
    """The documents in the rows of a split; the last may be cut off."""
    batch = rows_of(samples)
    stream = np.append(batch["tokens"].ravel(), batch["targets"][-1, -1])
    text = splits.tokenizer.decode(stream.tolist(), skip_special_tokens=False)
    assert text.startswith(END)
    return text.removeprefix(END).split(END)


def test_rows_hold_every_document_of_the_split_as_it_was(splits):
    *whole, cut = texts_of(splits, splits.train)
    held_out = [text for text in texts_of(splits, splits.validation) if text]

    assert len(held_out) == 8  # 20 % of 40
    assert sorted(held_out) == sorted(set(TEXTS) - set(whole) - {find(cut)})
    assert len(whole) >= 31
    assert set(whole) <= set(TEXTS)
    assert not set(whole) & set(held_out)


def find(start):
    """The document that begins so, if there is something to begin."""
    return next((text for text in TEXTS if start and text.startswith(start)), None)


def test_targets_are_the_tokens_one_further_on(splits):
    batch = rows_of(splits.train)

    np.testing.assert_array_equal(batch["targets"][:, :-1], batch["tokens"][:, 1:])
    np.testing.assert_array_equal(batch["targets"][:-1, -1], batch["tokens"][1:, 0])
    assert (batch["weights"] == 1).all()


def test_document_numbers_change_at_each_end_of_text_alone(splits):
    batch = rows_of(splits.train)

    is_start = batch["tokens"] == splits.tokenizer.token_to_id(END)

    assert is_start[:, 1:].any()
    np.testing.assert_array_equal(
        np.diff(batch["documents"], axis=1), is_start[:, 1:].astype(int)
    )


def test_validation_predicts_each_token_and_each_end_once(splits):
    batch = rows_of(splits.validation)

    end = splits.tokenizer.token_to_id(END)
    counted = batch["weights"] > 0
    assert counted.sum() == splits.validation.num_tokens
    assert ((batch["targets"] == end) & counted).sum() == 8
    # What fills up the last row comes after all that counts.
    assert (np.diff(counted.ravel().astype(int)) <= 0).all()
    assert not counted[-1, -1]


def test_documents_may_see_each_other(data, splits):
    joined = dataclasses.replace(data, separate_documents=False)

    batch = rows_of(gpt2_data.open_splits(joined, MODEL, 5).train)

    assert batch.keys() == {"tokens", "targets", "weights"}
    np.testing.assert_array_equal(batch["tokens"], rows_of(splits.train)["tokens"])


def test_seed_decides_split_and_order(data, splits):
    same, other = (gpt2_data.open_splits(data, MODEL, seed).train for seed in (5, 6))

    assert same.documents.tolist() == splits.train.documents.tolist()
    assert set(other.documents) != set(same.documents)
    assert (np.diff(same.documents) < 0).any()


def test_equal_documents_are_on_one_side(data, tmp_path):
    lines = [json.dumps({"text": TEXTS[n % 8]}) for n in range(40)]
    (tmp_path / "equal.jsonl").write_text("\n".join(lines))
    equal = dataclasses.replace(data, files=(str(tmp_path / "equal.jsonl"),))

    splits = gpt2_data.open_splits(equal, MODEL, 5)

    trained = set(texts_of(splits, splits.train)[:-1])
    held_out = {text for text in texts_of(splits, splits.validation) if text}
    assert held_out
    assert not trained & held_out


@pytest.mark.parametrize("vocab_size", [257, 300])
def test_tokens_write_every_text(data, tmp_path, vocab_size):
    texts = whole_texts.open_texts(data.files, tmp_path)

    tokens = tokenizer.train(
        texts, tmp_path, vocab_size=vocab_size, kind=byte_bpe.BYTE_BPE
    )

    assert tokens.get_vocab_size() == vocab_size
    text = "\tnaïve 字  \r\n\x00 🙂 never seen\n\n"
    assert tokens.decode(tokens.encode(text).ids) == text


def test_training_a_vocabulary_twice_gives_the_same(data, tmp_path):
    texts = whole_texts.open_texts(data.files, tmp_path)

    one, other = (
        tokenizer.train(texts, tmp_path / name, vocab_size=400, kind=byte_bpe.BYTE_BPE)
        for name in "ab"
    )

    assert one.to_str() == other.to_str()


def test_own_tokenizer_is_used(data, splits, tmp_path):
    splits.tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = dataclasses.replace(data, tokenizer=str(tmp_path / "tokenizer.json"))

    found = gpt2_data.open_splits(own, dataclasses.replace(MODEL, vocab_size=400), 5)

    assert found.fingerprint == splits.fingerprint


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        ("One.\n\nTwo.\n", ["One.\n\nTwo.\n"]),
        (f"One.\n{END}\nTwo.{END}Three.", ["One.\n", "Two.", "Three."]),
        ("a" * 20 + "\nb\n" + "c" * 5, ["a" * 20 + "\n", "b\n" + "c" * 5]),
    ],
    ids=["file", "separated", "long"],
)
def test_text_file_is_a_document(tmp_path, monkeypatch, content, documents):
    monkeypatch.setattr(whole_texts, "MAX_CHARACTERS", 20)
    (tmp_path / "a.txt").write_text(content)

    texts = whole_texts.open_texts([str(tmp_path / "a.txt")], tmp_path)

    assert [text for (text,) in texts.documents()] == documents


def test_corpus_smaller_than_a_row_says_what_it_needs(data, tmp_path):
    (tmp_path / "a.txt").write_text("tiny")
    small = dataclasses.replace(
        data, files=(str(tmp_path / "a.txt"),), validation_fraction=0.0, seq_length=512
    )

    with pytest.raises(ValueError, match="The corpus, a.txt, is smaller") as error:
        gpt2_data.open_splits(small, MODEL, 5)

    assert "of its 1 documents 1 are to be trained on, with 5 tokens. It needs 512" in (
        str(error.value)
    )


def test_text_that_is_all_held_out_is_an_error(data, tmp_path):
    (tmp_path / "a.txt").write_text("one document " * 99)
    single = dataclasses.replace(data, files=(str(tmp_path / "a.txt"),))

    with pytest.raises(ValueError, match="of its 1 documents 0 are to be trained on"):
        gpt2_data.open_splits(single, MODEL, 5)


def test_vocabulary_without_room_for_the_bytes_is_an_error(data):
    with pytest.raises(ValueError, match="model.vocab_size=256 leaves no room"):
        gpt2_data.open_splits(data, Gpt2Config(vocab_size=256), 5)


def test_tokenizer_larger_than_the_model_names_both(data, splits, tmp_path):
    splits.tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = dataclasses.replace(data, tokenizer=str(tmp_path / "tokenizer.json"))

    with pytest.raises(ValueError, match="300 tokens, more than model.vocab_size=299"):
        gpt2_data.open_splits(own, Gpt2Config(vocab_size=299), 5)


def test_tokenizer_without_an_end_of_text_is_an_error(data, tmp_path):
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "t.json"))
    own = dataclasses.replace(data, tokenizer=str(tmp_path / "t.json"))

    with pytest.raises(ValueError, match=r"has no <\|endoftext\|> .*GPT-2 needs"):
        gpt2_data.open_splits(own, MODEL, 5)


def test_file_without_text_is_an_error(data, tmp_path):
    (tmp_path / "a.txt").write_text(" \n\n")
    empty = dataclasses.replace(data, files=(str(tmp_path / "a.txt"),))

    with pytest.raises(ValueError, match=r"a.txt' holds no text"):
        gpt2_data.open_splits(empty, MODEL, 5)


@pytest.mark.slow
def test_default_is_the_source_of_the_standard_library(tmp_path):
    data = DataConfig(cache_dir=str(tmp_path))

    splits = gpt2_data.open_splits(data, Gpt2Config(vocab_size=8192), 5)

    assert splits.summary.startswith("the source of Python's standard library: ")
    assert splits.train.num_tokens > 2e6
    assert splits.tokenizer.get_vocab_size() == 8192
    assert "import " in splits.tokenizer.decode(splits.train.store.tokens[:4000])
