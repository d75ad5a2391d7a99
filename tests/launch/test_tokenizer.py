import collections
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from launch.data import corpus, token_store, tokenizer

SPECIAL = list(tokenizer.SPECIAL_TOKENS)


def make_corpus(tmp_path, text, name="text.txt"):
    path = tmp_path / name
    path.write_text(text)
    return corpus.open_corpus([str(path)], tmp_path / "cache")


def random_text(num_words=20_000):
    """Words with many ties between the frequencies of their parts."""
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprst" for b in "aeiouéß"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(3000)]
    return " ".join(rng.choices(words, k=num_words)) + "."


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("trained")
    text = make_corpus(tmp_path, random_text())
    return text, tokenizer.train(text, tmp_path / "cache", vocab_size=1000)


def test_trained_vocabulary_has_the_wanted_size_and_begins_with_special_tokens(trained):
    _, tokens = trained

    assert tokens.get_vocab_size() == 1000
    assert [tokens.id_to_token(id) for id in range(5)] == SPECIAL


def test_training_again_gives_the_same_vocabulary(trained, tmp_path):
    text, tokens = trained

    again = tokenizer.train(text, tmp_path, vocab_size=1000)

    assert again.get_vocab() == tokens.get_vocab()


def test_trained_tokenizer_lowers_case_and_drops_accents(trained):
    _, tokens = trained
    ids = [tokens.encode(word).ids for word in ("BÉRO", "bero")]

    assert ids[0] == ids[1]
    assert tokens.token_to_id("[UNK]") not in ids[0]


def test_pieces_after_the_first_are_continuations(trained):
    _, tokens = trained
    is_continuation = tokenizer.vocabulary(tokens).is_continuation

    ids = tokens.encode("bacadafa gaha.", add_special_tokens=False).ids

    pieces = [tokens.id_to_token(id) for id in ids]
    assert is_continuation[ids].tolist() == [p.startswith("##") for p in pieces]
    assert 0 < is_continuation[ids].sum() == len(ids) - 3


def test_decoding_joins_the_pieces(trained):
    _, tokens = trained

    assert tokens.decode(tokens.encode("Bacadafa gaha.").ids) == "bacadafa gaha."


def test_trained_tokenizer_is_kept_by_corpus_and_size(trained, tmp_path):
    _, _ = trained
    one, other = (make_corpus(tmp_path, t, t[0]) for t in ("Yes it is.", "No it is."))
    for text, size in ((one, 100), (one, 100), (one, 101), (other, 100)):
        tokenizer.train(text, tmp_path / "cache", vocab_size=size)

    kept = list((tmp_path / "cache").glob("wordpiece-*.json"))
    assert len(kept) == 3
    assert tokenizers.Tokenizer.from_file(str(kept[0])).get_vocab_size() <= 101


def test_small_corpus_gives_fewer_tokens(tmp_path):
    text = make_corpus(tmp_path, "One word and another word.")
    tokens = tokenizer.train(text, tmp_path / "cache", vocab_size=30522)

    assert 5 < tokens.get_vocab_size() < 100
    assert tokens.token_to_id("word") is not None


def test_letters_take_half_of_the_vocabulary_at_most(tmp_path):
    letters = [chr(0x4E00 + n) for n in range(500)]
    text = make_corpus(tmp_path, "。".join(letters + letters[:10]))
    tokens = tokenizer.train(text, tmp_path / "cache", vocab_size=100)

    vocabulary = tokens.get_vocab()
    assert len(vocabulary) <= 100
    assert set(letters[:10]) < set(vocabulary)
    assert not any(token.startswith("##") for token in vocabulary)


def test_vocabulary_without_room_is_refused(tmp_path):
    text = make_corpus(tmp_path, "One.")

    with pytest.raises(ValueError, match="vocab_size=63 leaves no room.*at least 64"):
        tokenizer.train(text, tmp_path / "cache", vocab_size=63)


def test_errors_of_the_corpus_reach_the_caller(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"Good.\n\nBad\0.")
    text = corpus.open_corpus([str(path)], tmp_path)

    with pytest.raises(ValueError, match="bad.txt' is not text: at byte offset 10"):
        tokenizer.train(text, tmp_path / "cache", vocab_size=100)

    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]


def write_vocabulary(tmp_path, *tokens, name="vocab.txt"):
    path = tmp_path / name
    path.write_text("\n".join(tokens) + "\n")
    return str(path)


def load(path, vocab_size=100, masks_words=True):
    return tokenizer.load(str(path), vocab_size=vocab_size, masks_words=masks_words)


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (["cafe", "##s", "."], ["cafe", "##s", "."]),
        (["Café", "##s", "cafe", "."], ["Café", "##s", "."]),
    ],
    ids=["uncased", "cased"],
)
def test_vocab_txt_numbers_tokens_by_line(tmp_path, words, pieces):
    tokens = load(write_vocabulary(tmp_path, *SPECIAL, "[unused0]", *words))

    encoding = tokens.encode("Cafés.", add_special_tokens=False)

    assert encoding.tokens == pieces
    assert encoding.ids == [6 + words.index(piece) for piece in pieces]


def test_tables_know_special_and_unused_tokens(tmp_path):
    path = write_vocabulary(tmp_path, *reversed(SPECIAL), "[unused0]", "a", "##b")

    vocabulary = tokenizer.vocabulary(load(path))

    assert vocabulary.size == 8
    ids = (vocabulary.mask, vocabulary.sep, vocabulary.cls, vocabulary.pad)
    assert ids == (0, 1, 2, 4)
    assert vocabulary.ordinary.tolist() == [6, 7]
    assert np.flatnonzero(vocabulary.is_continuation).tolist() == [7]


def test_tokenizer_json_is_used_without_its_truncation(trained, tmp_path):
    _, tokens = trained
    tokens = tokenizers.Tokenizer.from_str(tokens.to_str())
    tokens.enable_truncation(2)
    tokens.enable_padding()
    tokens.save(str(tmp_path / "tokenizer.json"))

    loaded = load(tmp_path / "tokenizer.json", vocab_size=1000)

    assert loaded.get_vocab() == tokens.get_vocab()
    assert len(loaded.encode("ba ca da", add_special_tokens=False).ids) == 3
    assert loaded.padding is None


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="data.tokenizer='.*/no.json' is not a"):
        load(tmp_path / "no.json")


def test_missing_special_tokens_are_all_named(tmp_path):
    path = write_vocabulary(tmp_path, "[PAD]", "[UNK]", "[SEP]", "word")

    with pytest.raises(
        ValueError, match=r"has no \[CLS\], \[MASK\] among its 4 tokens"
    ):
        load(path)


def test_larger_tokenizer_names_both_numbers(tmp_path):
    path = write_vocabulary(tmp_path, *SPECIAL, "one", "two")

    with pytest.raises(ValueError, match="has 7 tokens, more than model.vocab_size=6"):
        load(path, vocab_size=6)

    assert load(path, vocab_size=7).get_vocab_size() == 7


def test_repeated_lines_are_refused(tmp_path):
    path = write_vocabulary(tmp_path, *SPECIAL, "one", "one")

    with pytest.raises(ValueError, match=r"token per line: lines are repeated: \['one"):
        load(path)


@pytest.mark.parametrize("content", ["{}", "word", "\x00"])
def test_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)

    with pytest.raises(ValueError, match="json' is not a tokenizer.json: .* line 1"):
        load(path)


def test_tokenizer_that_does_not_mark_pieces_cannot_mask_words(tmp_path):
    ids = {token: id for id, token in enumerate([*SPECIAL, "a", "b"])}
    bpe = tokenizers.Tokenizer(models.BPE(ids, []))
    path = tmp_path / "tokenizer.json"
    bpe.save(str(path))

    with pytest.raises(ValueError, match="is a BPE model.*Set data.masking='token'"):
        load(path)

    assert load(path, masks_words=False).get_vocab() == ids


def test_store_holds_the_tokens_of_every_sentence(tmp_path):
    text = make_corpus(tmp_path, "One two. Two one.\n\n\x7f\n\nThree. \x7f\n\nOne!")
    tokens = load(write_vocabulary(tmp_path, *SPECIAL, "one", "two", "three", ".", "!"))

    store = token_store.tokenize(text, tokens, tmp_path / "cache")

    assert store.tokens.tolist() == [5, 6, 8, 6, 5, 8, 7, 8, 5, 9]
    assert store.sentence_starts.tolist() == [0, 3, 6, 8, 10]
    assert store.document_starts.tolist() == [0, 2, 3, 4]
    assert store.tokens.dtype == np.uint16
    assert store.num_documents == len(set(store.document_hashes.tolist())) == 3


def test_store_is_the_same_in_whatever_parts_it_is_made(tmp_path, monkeypatch):
    text = make_corpus(tmp_path, "\n\n".join("One. Two." for _ in range(10)) + " One.")
    tokens = load(write_vocabulary(tmp_path, *SPECIAL, "one", "two", "."))
    whole = token_store.tokenize(text, tokens, tmp_path / "whole")
    monkeypatch.setattr(token_store, "_SENTENCES_PER_PART", 3)

    parts = token_store.tokenize(text, tokens, tmp_path / "parts")

    assert parts.fingerprint == whole.fingerprint
    for name in ("tokens", "sentence_starts", "document_starts", "document_hashes"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    counts = collections.Counter(parts.document_hashes.tolist())
    assert sorted(counts.values()) == [1, 9]


def test_store_is_mapped_and_kept_by_tokenizer(tmp_path):
    text = make_corpus(tmp_path, "One. Two.")
    for words in (["one", "two", "."], ["two", "one", "."], ["one", "two", "."]):
        tokens = load(write_vocabulary(tmp_path, *SPECIAL, *words))
        store = token_store.tokenize(text, tokens, tmp_path / "cache")

    assert len(list((tmp_path / "cache").glob("tokens-*"))) == 2
    assert not store.tokens.flags.owndata
    assert not store.tokens.flags.writeable


def test_large_vocabularies_are_stored_in_32_bits(tmp_path):
    text = make_corpus(tmp_path, "One.")
    numbers = [f"n{n}" for n in range(2**16)]
    path = write_vocabulary(tmp_path, *SPECIAL, *numbers, "one", ".")

    store = token_store.tokenize(text, load(path, vocab_size=2**17), tmp_path / "cache")

    assert store.tokens.tolist() == [2**16 + 5, 2**16 + 6]


def test_text_without_tokens_is_refused(tmp_path):
    text = make_corpus(tmp_path, "\x7f")
    tokens = load(write_vocabulary(tmp_path, *SPECIAL))

    with pytest.raises(ValueError, match="makes no token of the corpus, text.txt"):
        token_store.tokenize(text, tokens, tmp_path / "cache")
