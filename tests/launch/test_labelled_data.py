"""Labelled texts and words: what is in the samples, what is an error."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from launch import labelled_data
from launch.data import labelled_samples, python_tasks, tokenizer
from launch.run_config import DataConfig
from models.bert_heads import BertHeadConfig

MODEL = BertHeadConfig(vocab_size=64, num_classes=3)
WORDS = "the cat dog tree house sees likes a red green ##s ##es".split()
IDS = {token: i for i, token in enumerate([*tokenizer.SPECIAL_TOKENS, *WORDS])}
PAD, UNK, CLS, SEP, _ = range(5)


def write_jsonl(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


@pytest.fixture
def make_data(tmp_path):
    """Returns a data section whose files hold the records given."""
    vocabulary = tokenizers.Tokenizer(models.WordPiece(IDS, unk_token="[UNK]"))
    vocabulary.normalizer = tokenizers.normalizers.BertNormalizer()
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    vocabulary.save(str(tmp_path / "tokenizer.json"))

    def make_data(records, held_out=None, **fields):
        given = {"files": (write_jsonl(tmp_path / "train.jsonl", records),)}
        if held_out is not None:
            path = write_jsonl(tmp_path / "held_out.jsonl", held_out)
            given["validation_files"] = (path,)
        defaults = {
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "cache_dir": str(tmp_path / "cache"),
            "seq_length": 8,
            "validation_fraction": 0.0,
        }
        return DataConfig(**{**defaults, **given, **fields})

    return make_data


def classify(data, model=MODEL):
    return labelled_data.open_classifier_splits(data, model, 3)


def tag(data, model=MODEL):
    return labelled_data.open_tagger_splits(data, model, 3)


def batch_of(samples):
    rows = np.arange(len(samples))
    return samples.make(rows, rows)


def ids(*tokens):
    return [IDS[token] for token in tokens]


def text(content, label):
    return {"text": content, "label": label}


def test_text_is_a_row_with_its_class(make_data):
    splits = classify(make_data([text("The cats", "b"), text("a dog sees", "a")]))

    batch = batch_of(splits.train)

    assert splits.classes == ("a", "b")
    np.testing.assert_array_equal(
        batch["tokens"],
        [
            [CLS, *ids("the", "cat", "##s"), SEP, PAD, PAD, PAD],
            [CLS, *ids("a", "dog", "sees"), SEP, PAD, PAD, PAD],
        ],
    )
    np.testing.assert_array_equal(batch["is_token"][0], [1] * 5 + [0] * 3)
    assert not batch["segments"].any()
    np.testing.assert_array_equal(batch["targets"], [[0, 1, 0], [1, 0, 0]])
    np.testing.assert_array_equal(batch["weights"], [1, 1])


def test_pair_is_cut_where_it_is_longer(make_data):
    pair = {"text": "cat cat cat cat", "text_pair": "dog", "label": 0}
    long = {"text": "cat cat cat cat", "text_pair": "dog tree red", "label": 1}
    splits = classify(make_data([pair, long, text("the " * 9, 1)]))

    batch = batch_of(splits.train)

    np.testing.assert_array_equal(
        batch["tokens"],
        [
            [CLS, *ids(*["cat"] * 4), SEP, *ids("dog"), SEP],
            [CLS, *ids("cat", "cat", "cat"), SEP, *ids("dog", "tree"), SEP],
            [CLS, *ids(*["the"] * 6), SEP],
        ],
    )
    np.testing.assert_array_equal(
        batch["segments"], [[0] * 6 + [1] * 2, [0] * 5 + [1] * 3, [0] * 8]
    )
    assert splits.summary.endswith("; 2 cut to data.seq_length=8 tokens")


def test_label_of_a_word_is_asked_for_at_its_first_piece(make_data):
    words = ["Cats", "\u200b", "dog", "unseen", "house"]
    record = {"words": words, "labels": ["N", "?", "N", "V", "N"]}
    splits = tag(make_data([record], seq_length=9))

    batch = batch_of(splits.train)

    assert splits.classes == ("?", "N", "V")
    np.testing.assert_array_equal(
        batch["tokens"],
        [[CLS, *ids("cat", "##s"), UNK, *ids("dog"), UNK, *ids("house"), SEP, PAD]],
    )
    np.testing.assert_array_equal(batch["weights"], [[0, 1, 0, 1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(
        batch["targets"] * (batch["weights"] > 0), [[0, 1, 0, 0, 1, 2, 1, 0, 0]]
    )
    assert "cut" not in splits.summary


def test_words_that_are_cut_off_are_not_asked_for(make_data):
    record = {"words": ["cat"] * 9, "labels": [*"ab", *"c" * 7]}
    splits = tag(make_data([record]))

    batch = batch_of(splits.train)

    assert batch["weights"].sum() == 6
    assert splits.summary.endswith("; 1 cut to data.seq_length=8 tokens")


def test_classes_have_the_order_of_numbers_or_of_the_config(make_data):
    records = [text("cat", label) for label in (10, 9, -1)]
    assert classify(make_data(records)).classes == ("-1", "9", "10")

    data = make_data(records, classes=("10", "9", "-1"))
    splits = classify(data)
    np.testing.assert_array_equal(batch_of(splits.train)["targets"], np.eye(3))
    assert splits.classes == data.classes


def test_smoothing_is_of_training_alone(make_data):
    records = [text(word, n % 3) for n, word in enumerate(WORDS[:9])]
    data = make_data(records, label_smoothing=0.3, validation_fraction=0.4)

    splits = classify(data)

    train, held_out = batch_of(splits.train), batch_of(splits.validation)
    np.testing.assert_allclose(
        np.sort(train["targets"], axis=1), [[0.1, 0.1, 0.8]] * 5, rtol=1e-6
    )
    assert set(held_out["targets"].ravel()) == {0, 1}


def test_what_is_held_out_is_not_trained_on(make_data):
    records = [text(word, n % 2) for n, word in enumerate(WORDS[:9])] * 3
    splits = classify(make_data(records, validation_fraction=0.3))
    rows = [
        {tuple(row) for row in batch_of(part)["tokens"].tolist()}
        for part in (splits.train, splits.validation)
    ]
    assert all(rows)
    assert not rows[0] & rows[1]

    held_out = [text("cat", 1), text("tree red", 0)]
    splits = classify(make_data(records, held_out))
    assert len(splits.train) == 24
    assert len(splits.validation) == 2
    assert "; 3 left out, as they are held out too" in splits.summary


def test_samples_are_read_once(make_data, monkeypatch):
    records = [text("cat", 0), text("dog", 1)]
    first = classify(make_data(records))
    monkeypatch.setattr(labelled_data.labelled_tokens, "from_examples", None)

    assert classify(make_data(records)).fingerprint == first.fingerprint


GOOD = [text("cat", "a"), text("dog", "b")]
WORDS_GOOD = [{"words": ["cat", "dog"], "labels": ["a", "b"]}]


@pytest.mark.parametrize(
    ("records", "fields", "message"),
    [
        (
            [*GOOD, text("tree", "c")],
            {"classes": ("a", "b")},
            "train.jsonl:3: the label 'c' is none of the 2 classes 'a', 'b'. Correct",
        ),
        (
            GOOD,
            {"held_out": [text("red", "a"), text("red", "z"), text("red", "y")]},
            "held_out.jsonl:2: the label 'z' is none of the 2 classes 'a', 'b', nor are"
            " 1 others. Correct it, or name all classes in data.classes.",
        ),
        (
            [text("cat", n) for n in range(4)],
            {},
            "are of 4 classes, more than model.num_classes=3. Set model.num_classes=4.",
        ),
        ([text("cat", "a")] * 2, {}, "are of one class, 'a', so there is nothing to"),
        (
            GOOD,
            {"classes": ("a", "a", "b")},
            "has several classes of the name 'a', and",
        ),
        ([*GOOD, {"text": "cat"}], {}, "train.jsonl:3: the label is None, but a label"),
        ([*GOOD, text("cat", True)], {}, "train.jsonl:3: the label is True, but a"),
        ([*GOOD, text(" ", "a")], {}, "train.jsonl:3: there is no text under 'text'"),
        (
            [*GOOD, {**GOOD[0], "text_pair": 3}],
            {},
            "train.jsonl:3: there is no text under 'text_pair', but 3. A sample is",
        ),
        ([*GOOD, ["cat"]], {}, "train.jsonl:3: a list. Each line is an object"),
        (GOOD, {"validation_fraction": 1.0}, "All 2 samples of train.jsonl are held"),
        (GOOD, {"held_out": GOOD}, "All 2 samples of train.jsonl are held out"),
        (GOOD, {"files": ("none.jsonl",)}, "data.files names 1 of 1 files that do not"),
        (
            GOOD,
            {"validation_files": ("none.jsonl",)},
            "data.validation_files names 1 of 1 files that do not exist: 'none.jsonl'.",
        ),
    ],
)
def test_texts_that_cannot_be_used_are_an_error(make_data, records, fields, message):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        classify(make_data(records, **fields))

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"words": ["cat"]}, "for 1 words there must be as many 'labels', but there"),
        ({"words": ["a", "b"], "labels": ["x"]}, "for 2 words there must be as many"),
        ({"words": ["a", " "], "labels": ["x", "y"]}, "among 'words' there is ' ', wh"),
        ({"words": [], "labels": []}, "there is no list of words under 'words', but"),
        ({"text": "a cat"}, "there is no list of words under 'words', but None"),
        (
            {"words": ["a"], "labels": [1.5]},
            "the label is 1.5, but a label is a string",
        ),
    ],
)
def test_words_that_cannot_be_used_are_an_error(make_data, record, message):
    with pytest.raises(ValueError, match=r"train.jsonl:2: ") as error:
        tag(make_data([*WORDS_GOOD, record]))

    assert message in str(error.value)


def test_tokenizer_must_fit_the_model(make_data):
    with pytest.raises(ValueError, match="17 tokens, more than model.vocab_size=16"):
        classify(make_data(GOOD), dataclasses.replace(MODEL, vocab_size=16))


def test_tokenizer_is_trained_on_what_is_trained_on(make_data):
    records = [text(f"unusual{n} words", n % 2) for n in range(40)]
    splits = classify(
        make_data(records, tokenizer=None), dataclasses.replace(MODEL, vocab_size=80)
    )

    assert "words" in splits.tokenizer.get_vocab()


def test_own_samples_need_no_embedded_ones(make_data, monkeypatch):
    monkeypatch.setattr(python_tasks, "PACKAGES", ("no_such_package",))

    assert len(classify(make_data(GOOD)).train) == 2
    with pytest.raises(ValueError, match="lacks that of no_such_package. Name your"):
        classify(make_data([], files=()))


def test_embedded_tasks_are_of_the_standard_library():
    packages = list(python_tasks.packages().examples())
    counts = {name: 0 for name in python_tasks.PACKAGES}
    for example in packages:
        counts[example.labels[0]] += 1
    assert len(counts) == 10
    assert min(counts.values()) > 100

    words = list(python_tasks._words('x = f("a b", 1)  # if so\nif x: pass\n'))
    assert words == [
        *zip("x = f (".split(), ["NAME", "OP", "NAME", "OP"], strict=True),
        *(('"a', "STRING"), ('b"', "STRING"), (",", "OP"), ("1", "NUMBER")),
        *((")", "OP"), ("#", "COMMENT"), ("if", "COMMENT"), ("so", "COMMENT")),
        *(("if", "KEYWORD"), ("x", "NAME"), (":", "OP"), ("pass", "KEYWORD")),
    ]


def test_label_beside_the_only_class_named_is_an_error(make_data):
    with pytest.raises(ValueError, match=r"label 'b' is none of the 1 classes 'a'\."):
        classify(make_data(GOOD, classes=("a",)))


def test_whole_files_of_embedded_tasks_are_held_out(make_data):
    data = make_data([], files=(), validation_fraction=0.1, seq_length=32)
    model = dataclasses.replace(MODEL, num_classes=10)

    splits = classify(data, model)

    store = splits.train.store
    trained, held_out = splits.train.indices, splits.validation.indices
    assert 0.1 * len(store) <= len(held_out) < 0.3 * len(store)
    for name in ("sources", "hashes"):
        values = getattr(store, name)
        assert not np.isin(values[trained], values[held_out]).any()
    labels = store.labels
    assert set(labels[trained]) == set(labels[held_out]) == set(range(10))


def test_rows_of_every_length_hold_as_much_as_fits(make_data):
    pair = {"text": "cat " * 5, "text_pair": "dog " * 7, "label": 0}
    splits = classify(make_data([pair, text("red", 1)]))
    store, vocabulary = splits.train.store, splits.train.vocabulary

    for length in range(5, 20):
        rows = labelled_samples.make_rows(store, np.arange(2), vocabulary, length)
        num_cat, num_dog = (
            int((rows.arrays["tokens"][0] == IDS[word]).sum())
            for word in ("cat", "dog")
        )
        assert num_cat + num_dog == min(12, length - 3)
        assert num_cat == min(5, max(-(-(length - 3) // 2), length - 3 - 7))
        assert (rows.arrays["tokens"][0] == SEP).sum() == 2
        assert rows.arrays["is_token"].sum(1).tolist() == [min(length, 15), 3]
        is_text = rows.places >= 0
        np.testing.assert_array_equal(
            rows.arrays["tokens"][is_text], store.tokens[rows.places[is_text]]
        )
