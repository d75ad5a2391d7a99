"""Batches of a corpus whose words name their document and sentence."""

import dataclasses
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from launch import bert_data, families, input_pipeline, ramp_up, run_config
from launch.data import bert_samples, masking, token_store, tokenizer
from launch.run_config import DataConfig
from models.bert import BertConfig

NUM_DOCUMENTS = 40
SPECIAL = tokenizer.SPECIAL_TOKENS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of 8 to 27 sentences of three words: document, sentence, full stop."""
    folder = tmp_path_factory.mktemp("data")
    documents = [
        " ".join(f"D{d}\ns{s}." for s in range(8 + d % 20))
        for d in range(NUM_DOCUMENTS)
    ]
    (folder / "text.txt").write_text("\n\n".join(documents))
    words = [f"D{d}" for d in range(NUM_DOCUMENTS)] + [f"s{s}" for s in range(30)]
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *words, "."]))
    return DataConfig(
        files=(str(folder / "text.txt"),),
        tokenizer=str(folder / "vocab.txt"),
        cache_dir=str(folder / "cache"),
        seq_length=32,
        validation_fraction=0.2,
    )


def build(data, *, vocab_size=1000, seed=5, global_batch_size=8, **kwargs):
    return families.build(
        run_config.RunConfig(
            model_name="bert",
            model=BertConfig(vocab_size=vocab_size),
            data=data,
            optim=run_config.OptimConfig(),
            train=run_config.TrainConfig(
                seed=seed, global_batch_size=global_batch_size
            ),
            dist=run_config.DistConfig(),
            eval=run_config.EvalConfig(),
            checkpoint=run_config.CheckpointConfig(),
        ),
        **kwargs,
    )


def take(batches, num):
    """The first batches as one."""
    parts = list(itertools.islice(batches, num))
    batches.close()
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def documents_of(pipeline, batch):
    """The documents that the unmasked words of each sample name."""
    ids = np.arange(len(SPECIAL), len(SPECIAL) + NUM_DOCUMENTS)
    tokens = batch["tokens"].copy()
    rows, slots = np.nonzero(batch["weights"])
    tokens[rows, batch["positions"][rows, slots]] = 0
    return [set(ids[np.isin(ids, row)] - len(SPECIAL)) for row in tokens]


def test_batch_has_the_announced_shapes(data):
    pipeline = build(data)
    shapes = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for name, array in take(pipeline.train_batches(), 1).items()
    }

    assert (
        shapes == pipeline.batch_shapes == bert_data.batch_shapes(data, BertConfig(), 8)
    )


@pytest.mark.parametrize("global_batch_size", [3, 24])
def test_stream_of_samples_is_the_same_for_every_batch_size(data, global_batch_size):
    expected = take(build(data).train_batches(), 9)
    pipeline = build(data, global_batch_size=global_batch_size)

    samples = take(pipeline.train_batches(), 72 // global_batch_size)

    assert_equal(samples, expected)


def test_each_process_loads_its_rows(data):
    expected = take(build(data).train_batches(), 3)
    parts = [
        take(build(data, rows=slice(first, first + 4)).train_batches(), 3)
        for first in (0, 4)
    ]

    for name in expected:
        halves = [part[name].reshape(3, 4, *part[name].shape[1:]) for part in parts]
        joined = np.concatenate(halves, axis=1).reshape(expected[name].shape)
        np.testing.assert_array_equal(joined, expected[name])


@pytest.mark.parametrize("start_step", [1, 5, 30])
def test_resuming_goes_on_where_it_stopped(data, start_step):
    pipeline = build(data)
    expected = take(pipeline.train_batches(), start_step + 2)

    resumed = take(build(data).train_batches(start_step), 2)

    assert_equal(resumed, {name: a[-16:] for name, a in expected.items()})


def test_a_far_step_is_there_at_once(data):
    assert len(take(build(data).train_batches(10**12), 1)["tokens"]) == 8


def test_every_epoch_is_another_order_of_all_samples(data):
    pipeline = build(data, global_batch_size=1)
    num = pipeline.num_train_samples
    stream = input_pipeline._TrainBatch(
        samples=_Spans(),
        order=pipeline._order(),
        sizes=ramp_up.build(None, num),
        share=(0, num, num),
    )
    epochs = [stream(step).tolist() for step in range(3)]

    for epoch in epochs:
        assert sorted(epoch) == list(range(num))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_no_epoch_repeats_the_samples_of_another(data):
    pipeline = build(data, global_batch_size=1)
    num = pipeline.num_train_samples
    tokens = take(pipeline.train_batches(), 2 * num)["tokens"]

    first, second = ({row.tobytes() for row in half} for half in np.split(tokens, 2))

    assert len(first & second) < 0.1 * num


def test_seed_decides_order_and_samples(data):
    one, same, other = (
        take(build(data, seed=seed).train_batches(), 2) for seed in (5, 5, 6)
    )

    assert_equal(one, same)
    assert (one["tokens"] != other["tokens"]).mean() > 0.1


@pytest.mark.parametrize("global_batch_size", [1, 7, 64])
def test_validation_yields_every_sample_once(data, global_batch_size):
    expected = build(data, global_batch_size=1)
    num = expected.num_validation_samples
    pipeline = build(data, global_batch_size=global_batch_size)

    samples = take(pipeline.validation_batches(), None)

    assert len(samples["tokens"]) == -(-num // global_batch_size) * global_batch_size
    assert samples["sample_weights"].tolist() == [1] * num + [0] * (
        len(samples["tokens"]) - num
    )
    assert (samples["weights"][num:] == 0).all()
    assert samples["is_token"].any(axis=1).all()  # nothing to attend to gives NaN
    assert_equal(
        {name: array[:num] for name, array in samples.items()},
        take(expected.validation_batches(), None),
    )


def test_validation_is_the_same_every_time(data):
    pipeline = build(data)

    assert_equal(
        take(pipeline.validation_batches(), None),
        take(pipeline.validation_batches(), None),
    )


def test_validation_can_end_early_but_not_go_on_longer(data):
    pipeline = build(data)
    num_all = -(-pipeline.num_validation_samples // 8)

    assert len(list(pipeline.validation_batches(1))) == 1
    assert len(list(pipeline.validation_batches(num_all + 5))) == num_all


def test_validation_and_training_share_no_document(data):
    pipeline = build(data)
    num_batches = -(-pipeline.num_train_samples // 8)
    train = take(pipeline.train_batches(), 4 * num_batches)
    validation = take(pipeline.validation_batches(), None)

    trained, held_out = (
        set().union(*documents_of(pipeline, batch)) for batch in (train, validation)
    )

    assert (train["is_random_next"] == 1).any()
    assert (validation["is_random_next"] == 1).any()
    assert len(held_out) == 8  # 20 % of 40
    assert trained == set(range(NUM_DOCUMENTS)) - held_out


def test_labels_tell_whether_both_segments_are_of_one_document(data):
    batch = take(build(data).train_batches(), 30)
    pipeline = build(data)

    named = documents_of(pipeline, batch)
    is_two = np.array([len(documents) > 1 for documents in named])

    assert (batch["is_random_next"][is_two] == 1).all()
    # A masked document may go unseen.
    assert is_two.mean() == pytest.approx(batch["is_random_next"].mean(), abs=0.1)


def test_nothing_is_held_out_at_fraction_0(data):
    pipeline = build(dataclasses.replace(data, validation_fraction=0.0))

    assert pipeline.num_validation_samples == 0
    assert list(pipeline.validation_batches()) == []
    assert len(take(pipeline.train_batches(), 1)["tokens"]) == 8


def test_worker_processes_give_the_same_batches(data):
    expected = take(build(data).train_batches(2), 5)

    batches = build(dataclasses.replace(data, num_workers=2)).train_batches(2)

    assert_equal(take(batches, 5), expected)


def test_summary_says_what_there_is(data):
    pipeline = build(data)
    num_tokens = sum(3 * (8 + d % 20) for d in range(NUM_DOCUMENTS))
    store = pipeline.splits.train.store
    _, documents = bert_samples.split_documents(store, validation_fraction=0.2, seed=5)
    num_tokens -= bert_samples.count_tokens(store, documents)

    assert pipeline.summary() == (
        f"text.txt: 32 documents to train on with {num_tokens:,} tokens"
        f" of 76, {pipeline.num_train_samples} samples an epoch; 8 documents held out,"
        f" {pipeline.num_validation_samples} samples"
    )


def test_a_second_start_reads_no_text(data, monkeypatch):
    fingerprint = build(data).fingerprint
    monkeypatch.setattr(token_store, "_write", None)

    assert build(data).fingerprint == fingerprint


def test_page_about_data_tells_how_to_look_at_samples(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))  # an empty cache
    page = pathlib.Path(__file__).parents[2] / "docs" / "data.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]

    names = {}
    exec(code, names)

    summary, sample, speed = capsys.readouterr().out.splitlines()
    assert summary.startswith("the documentation of Python: ")
    assert sample.startswith("[CLS] ")
    assert int(speed.removesuffix(" samples a second")) > 0
    assert names["pipeline"].splits.train.vocabulary.size == 8192
    assert names["pipeline"].num_train_samples > 2000
    assert names["pipeline"].num_validation_samples > 20
    assert (tmp_path / ".cache" / "sbp-jax").is_dir()


def test_abandoned_iterators_do_not_keep_the_process_alive(data, tmp_path):
    script = tmp_path / "abandon.py"
    script.write_text(
        "from launch import bert_data, input_pipeline\n"
        "from launch.run_config import DataConfig\n"
        "from models.bert import BertConfig\n"
        f"splits = bert_data.open_splits({data!r}, BertConfig(), 0)\n"
        "pipeline = input_pipeline.build(splits, seed=0, global_batch_size=4)\n"
        "batches = pipeline.train_batches()\n"
        "print(len(next(batches)['tokens']))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Hello.", "1 documents the training split has 0 of two .*, 0 tokens"),
        ("One. Two.", "1 documents the training split has 0 of two .*, 0 tokens"),
        (
            "\n\n".join(["D1 s1 s2 s3 s4 s5. D1 s6."] * 2 + ["D2 s1.\nD2."]),
            "3 documents the training split has",
        ),
        (
            "\n\n".join(f"D{d} s{d}.\n" * 6 for d in range(20)),
            r"20 documents the validation split has 1 of two sentences or more, 18 tok",
        ),
        ("\n\n".join(["One."] * 500), "500 documents the training split has 0 of two"),
    ],
    ids=["one-sentence", "one-document", "few-tokens", "validation", "no-pairs"],
)
def test_corpus_smaller_than_a_sample_says_what_it_needs(data, tmp_path, text, numbers):
    (tmp_path / "text.txt").write_text(text)
    small = dataclasses.replace(
        data, files=(str(tmp_path / "text.txt"),), validation_fraction=0.05
    )

    with pytest.raises(ValueError, match=numbers) as error:
        build(small)

    assert "The corpus, text.txt, is smaller than a sample" in str(error.value)
    assert "needs two, and 29 tokens for data.seq_length=32. Add text" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_length": 4}, "data.seq_length=4 must be at least 5"),
        (
            {"masked_fraction": 0.0},
            "data.masked_fraction=0 leaves nothing to predict",
        ),
        ({"masking": "words"}, "data.masking='words' is not one of 'token'"),
        ({"num_workers": -1}, "data.num_workers=-1 must be at least 0"),
        ({"tokenizer": "none.json"}, "data.tokenizer='none.json' is not a file"),
        ({"files": ("none.txt",)}, "1 of 1 files that do not exist: 'none.txt'"),
        ({"cache_dir": "/dev/null/x"}, "cache '/dev/null/x' cannot be written"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_fields_are_named(data, fields, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build(dataclasses.replace(data, **fields))


def test_model_smaller_than_the_tokenizer_names_both(data):
    with pytest.raises(
        ValueError, match="has 76 tokens, more than model.vocab_size=75"
    ):
        build(data, vocab_size=75)


def test_rows_outside_the_batch_are_refused(data):
    with pytest.raises(ValueError, match=r"selects no row.*global_batch_size=8"):
        build(data, rows=slice(8, 16))


def test_shortest_sequence_makes_samples(data):
    pipeline = build(dataclasses.replace(data, seq_length=5))
    batch = take(pipeline.train_batches(), 10)

    assert (batch["is_token"].sum(axis=1) == 5).all()
    assert (batch["weights"].sum(axis=1) == 1).all()


def test_run_config_knows_the_maskings():
    assert run_config.MASKINGS == tuple(masking.MASKINGS)


class _Spans:
    """Gives the spans back instead of making samples of them."""

    def make(self, spans_B, _):
        return spans_B
