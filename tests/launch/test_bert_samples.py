"""Samples of a corpus in which every token says where it comes from."""

import pathlib

import numpy as np
import pytest

from launch.data import bert_samples, masking
from launch.data.bert_samples import BertSamples, Recipe
from launch.data.token_store import TokenStore
from launch.data.tokenizer import Vocabulary

FIRST_ID = 10  # token id = FIRST_ID + place in the corpus
PAD, CLS, SEP, MASK = 0, 2, 3, 4
NUM_SAMPLES = 4000


def make_store(num_documents=60, max_sentences=40, max_words=25, seed=0):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, max_sentences, num_documents)
    lengths = rng.integers(1, max_words, counts.sum())
    return TokenStore(
        path=pathlib.Path("nowhere"),
        fingerprint="",
        tokens=FIRST_ID + np.arange(lengths.sum(), dtype=np.int32),
        sentence_starts=np.concatenate([[0], lengths.cumsum()]),
        document_starts=np.concatenate([[0], counts.cumsum()]),
        document_hashes=rng.integers(0, 2**63, num_documents).astype(np.uint64),
    )


def make_samples(store, *, seed=7, **fields):
    recipe = Recipe(
        **{
            "seq_length": 64,
            "masked_fraction": 0.15,
            "masking": "whole_word",
            "short_fraction": 0.1,
            **fields,
        }
    )
    size = FIRST_ID + len(store.tokens)
    vocabulary = Vocabulary(
        size=size,
        pad=PAD,
        cls=CLS,
        sep=SEP,
        mask=MASK,
        is_continuation=np.random.default_rng(1).random(size) < 0.3,
        ordinary=np.arange(FIRST_ID, size, dtype=np.int32),
    )
    documents, _ = bert_samples.split_documents(store, validation_fraction=0, seed=0)
    return BertSamples(
        recipe=recipe,
        store=store,
        vocabulary=vocabulary,
        spans=bert_samples.cut_spans(store, documents, recipe.seq_length - 3),
        seed=seed,
    )


def make_batch(samples, num=NUM_SAMPLES):
    numbers = np.arange(num)
    return samples.make(numbers % len(samples.spans), numbers)


def restored(batch):
    """The tokens before masking."""
    tokens = batch["tokens"].copy()
    rows, slots = np.nonzero(batch["weights"])
    tokens[rows, batch["positions"][rows, slots]] = batch["targets"][rows, slots]
    return tokens


def is_masked(batch):
    masked = np.zeros(batch["tokens"].shape, bool)
    rows, slots = np.nonzero(batch["weights"])
    masked[rows, batch["positions"][rows, slots]] = True
    return masked


def segments(batch):
    """Places of the tokens of both segments of every sample."""
    tokens = restored(batch)
    pairs = []
    for row, ids in enumerate(tokens):
        first_sep, second_sep = np.flatnonzero(ids == SEP)
        both = ids[1:first_sep], ids[first_sep + 1 : second_sep]
        pairs.append((row, *(segment - FIRST_ID for segment in both)))
    return pairs


def document_of(store, places):
    sentences = np.searchsorted(store.sentence_starts, places, "right") - 1
    return np.searchsorted(store.document_starts, sentences, "right") - 1


@pytest.fixture(scope="module")
def store():
    return make_store()


@pytest.fixture(scope="module")
def batch(store):
    return make_batch(make_samples(store))


def assert_within(share, expected, num):
    """Five standard deviations of a share of independent draws."""
    assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / num)


def test_batch_has_the_announced_arrays(store, batch):
    shapes = bert_samples.shapes(make_samples(store).recipe, NUM_SAMPLES)

    assert {name: (a.shape, a.dtype.type) for name, a in batch.items()} == shapes
    assert batch["positions"].shape[1] == 10  # ceil(0.15 * 64)
    assert (batch["sample_weights"] == 1).all()


def test_sample_depends_on_seed_and_number_alone(store, batch):
    samples = make_samples(store)
    numbers = np.array([3999, 17, 0, 1234])

    again = samples.make(numbers % len(samples.spans), numbers)

    for name, array in again.items():
        np.testing.assert_array_equal(array, batch[name][numbers], err_msg=name)


def test_another_seed_or_number_gives_another_sample_of_the_span(store):
    samples, others = make_samples(store), make_samples(store, seed=8)
    span, numbers = np.array([5, 5]), np.array([5, 5 + len(samples.spans)])

    first, later = samples.make(span, numbers)["tokens"]
    other, _ = others.make(span, numbers)["tokens"]

    assert (first != later).any()
    assert (first != other).any()


def test_sample_is_cls_first_sep_second_sep_and_padding(batch):
    tokens, is_token = restored(batch), batch["is_token"]

    assert (tokens[:, 0] == CLS).all()
    assert ((tokens == SEP).sum(axis=1) == 2).all()
    np.testing.assert_array_equal(tokens == PAD, ~is_token)
    lengths = is_token.sum(axis=1)
    rows = np.arange(len(tokens))
    np.testing.assert_array_equal(is_token, np.arange(64)[None] < lengths[:, None])
    assert (tokens[rows, lengths - 1] == SEP).all()
    first_sep = (tokens == SEP).argmax(axis=1)
    columns = np.arange(64)[None]
    expected = (columns > first_sep[:, None]) & (columns < lengths[:, None])
    np.testing.assert_array_equal(batch["segments"], expected)


def test_segments_are_runs_of_the_corpus_inside_a_document(store, batch):
    for _, first, second in segments(batch):
        for places in (first, second):
            assert len(places) >= 1
            assert (np.diff(places) == 1).all()
            assert len(set(document_of(store, places))) == 1


def test_next_sentence_label_tells_the_truth(store, batch):
    starts = set(store.sentence_starts.tolist())
    for row, first, second in segments(batch):
        is_same = document_of(store, first[0]) == document_of(store, second[0])
        assert is_same == (batch["is_random_next"][row] == 0)
        is_cut = len(first) + len(second) == 61
        if is_same:
            assert first[-1] < second[0]
            assert is_cut or first[-1] + 1 == second[0]
        assert is_cut or {first[0], second[0]} <= starts


def test_half_of_the_second_segments_are_random(batch):
    assert_within(batch["is_random_next"].mean(), 0.5, NUM_SAMPLES)


def test_length_does_not_give_the_label_away(store):
    batch = make_batch(make_samples(make_store(max_sentences=200)))
    lengths, is_random = batch["is_token"].sum(axis=1), batch["is_random_next"] == 1

    assert abs(lengths[is_random].mean() - lengths[~is_random].mean()) < 2


@pytest.mark.parametrize("name", masking.MASKINGS)
def test_masked_share_is_the_wanted_one(store, name):
    batch = make_batch(make_samples(store, masking=name))
    num_text = batch["is_token"].sum(axis=1) - 3
    wanted = np.maximum(np.rint(0.15 * num_text), 1)
    num_masked = batch["weights"].sum(axis=1)

    if name == "token":
        np.testing.assert_array_equal(num_masked, wanted)
    else:  # one too few where only a longer word is left
        assert (num_masked <= wanted).all()
        assert num_masked.sum() > 0.99 * wanted.sum()


def test_masked_tokens_are_replaced_80_10_10(batch):
    masked = is_masked(batch)
    tokens, targets = batch["tokens"][masked], restored(batch)[masked]
    num = masked.sum()

    assert_within((tokens == MASK).mean(), 0.8, num)
    assert_within((tokens == targets).mean(), 0.1, num)
    assert_within(((tokens != MASK) & (tokens != targets)).mean(), 0.1, num)
    assert (tokens[tokens != MASK] >= FIRST_ID).all()


def test_random_replacements_come_from_the_whole_vocabulary(store, batch):
    masked = is_masked(batch)
    tokens, targets = batch["tokens"][masked], restored(batch)[masked]
    random = tokens[(tokens != MASK) & (tokens != targets)] - FIRST_ID
    middle = len(store.tokens) // 2

    assert_within((random < middle).mean(), 0.5, len(random))


def test_targets_are_the_tokens_at_sorted_positions(batch):
    num = batch["weights"].sum(axis=1).astype(int)
    for positions, targets, weights, n in zip(
        batch["positions"], batch["targets"], batch["weights"], num, strict=True
    ):
        assert (np.diff(positions[:n]) > 0).all()
        assert positions[0] > 0
        np.testing.assert_array_equal(weights, np.arange(10) < n)
        assert (positions[n:] == 0).all()
        assert (targets[:n] >= FIRST_ID).all()
        assert (targets[n:] == 0).all()


def test_every_position_is_masked_equally_often(store):
    batch = make_batch(make_samples(store, masking="token", short_fraction=0.0))
    masked, tokens = is_masked(batch), restored(batch)
    for part in np.array_split(np.arange(1, 63), 8):
        text = tokens[:, part] >= FIRST_ID
        assert masked[:, part][text].mean() == pytest.approx(0.15, abs=0.01)


@pytest.mark.parametrize("name", ["whole_word", "ngram"])
def test_words_are_masked_whole(store, name):
    samples = make_samples(store, masking=name)
    batch = make_batch(samples)
    masked, tokens = is_masked(batch), restored(batch)
    continues = samples.vocabulary.is_continuation[tokens] & (tokens >= FIRST_ID)
    # The first token of a segment begins a word, whatever it is.
    inside = continues[:, 1:] & (tokens[:, :-1] >= FIRST_ID)

    assert inside.sum() > 10_000
    np.testing.assert_array_equal(masked[:, 1:][inside], masked[:, :-1][inside])


def test_pieces_that_begin_a_segment_are_masked_too(store):
    samples = make_samples(store)
    batch = make_batch(samples)
    masked, tokens = is_masked(batch), restored(batch)
    continues = samples.vocabulary.is_continuation[tokens] & (tokens >= FIRST_ID)
    begins = continues[:, 1:] & np.isin(tokens[:, :-1], [CLS, SEP])

    assert masked[:, 1:][begins].mean() == pytest.approx(0.15, abs=0.03)


def test_pieces_are_masked_on_their_own_with_masking_token(store):
    samples = make_samples(store, masking="token")
    batch = make_batch(samples)
    masked, tokens = is_masked(batch), restored(batch)
    continues = samples.vocabulary.is_continuation[tokens] & (tokens >= FIRST_ID)

    apart = masked[:, 1:][continues[:, 1:]] != masked[:, :-1][continues[:, 1:]]
    assert_within(apart.mean(), 2 * 0.15 * 0.85, len(apart))


def test_short_samples_are_as_frequent_as_wanted():
    store = make_store(max_sentences=200)
    shares = {}
    for fraction in (0.0, 0.1, 1.0):
        batch = make_batch(make_samples(store, short_fraction=fraction))
        same = batch["is_random_next"] == 0
        shares[fraction] = (batch["is_token"].sum(axis=1) < 64)[same].mean()

    assert shares[0.0] < 0.01  # documents that are short themselves
    assert shares[1.0] > 0.7
    assert shares[0.1] == pytest.approx(0.1 * shares[1.0] + 0.9 * shares[0.0], abs=0.02)


def test_truncation_is_that_of_the_paper():
    for first in range(1, 12):
        for second in range(1, 12):
            lengths = [first, second]
            while sum(lengths) > 7:
                lengths[0 if lengths[0] > lengths[1] else 1] -= 1
            ours = bert_samples._truncate(np.array([[first], [second]]), 7)
            assert ours[:, 0].tolist() == lengths


def test_spans_cover_every_sentence_and_fill_a_sample(store):
    documents, _ = bert_samples.split_documents(store, validation_fraction=0, seed=0)
    spans = bert_samples.cut_spans(store, documents, 61)
    covered = np.zeros(len(store.sentence_starts) - 1, bool)

    for index, (first, last) in enumerate(zip(spans.first, spans.last, strict=True)):
        covered[first:last] = True
        document = document_of(store, store.sentence_starts[first])
        begin, end = store.document_starts[[document, document + 1]]
        assert begin <= first < last - 1
        assert last <= end == spans.document_last[index]
        num_tokens = store.sentence_starts[last] - store.sentence_starts[first]
        assert num_tokens >= 61 or (first, last) == (begin, end)
        siblings = slice(spans.siblings_first[index], spans.siblings_last[index])
        assert set(np.flatnonzero(spans.document_last == end)) == set(
            range(len(spans))[siblings]
        )

    is_long = np.repeat(
        np.diff(store.document_starts) > 1, np.diff(store.document_starts)
    )
    np.testing.assert_array_equal(covered, is_long)


def test_splits_share_no_document_and_hold_out_the_fraction(store):
    train, held_out = bert_samples.split_documents(
        store, validation_fraction=0.2, seed=3
    )
    usable = np.flatnonzero(np.diff(store.document_starts) > 1)

    assert set(train).isdisjoint(held_out)
    assert sorted([*train, *held_out]) == usable.tolist()
    assert len(held_out) == int(np.ceil(0.2 * len(usable)))


def test_split_is_decided_by_the_seed(store):
    one, same, other = (
        bert_samples.split_documents(store, validation_fraction=0.2, seed=seed)[1]
        for seed in (3, 3, 4)
    )

    assert one.tolist() == same.tolist()
    assert one.tolist() != other.tolist()


def test_equal_documents_are_on_the_same_side():
    twins = make_store()
    twins.document_hashes[:30] = twins.document_hashes[30:]

    train, held_out = bert_samples.split_documents(
        twins, validation_fraction=0.3, seed=0
    )

    hashes = twins.document_hashes
    assert set(hashes[train]).isdisjoint(hashes[held_out])


def test_number_of_predictions_survives_rounding():
    fields = {"masking": "token", "short_fraction": 0.0}
    numbers = [
        Recipe(seq_length=length, masked_fraction=fraction, **fields).num_predicted
        for length, fraction in ((100, 0.07), (128, 0.15), (512, 0.15))
    ]

    assert numbers == [7, 20, 77]
