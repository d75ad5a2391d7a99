"""Stop rules read the bytes that a tokenizer writes."""

import pytest
import tokenizers
from tokenizers import decoders, models

from launch import stop_rules
from launch.stop_rules import StopRules
from tests.launch import trained_runs


def test_bytes_of_tokens_are_those_that_decoding_gives():
    tokenizer = trained_runs.byte_tokenizer()
    tokenizer.add_tokens(["<b>\u00e9"])
    written = stop_rules.token_bytes(tokenizer)

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    assert set(written) == set(vocabulary.values()) - {vocabulary["<|endoftext|>"]}
    assert len({text for text in written.values() if len(text) == 1}) == 256
    assert written[vocabulary["def"]] == b"def"
    text = "if \u00e9 < \u4e2d:\n\tdef <b>\u00e9\x00"
    ids = tokenizer.encode(text).ids
    assert b"".join(written[token] for token in ids) == text.encode()


def test_string_that_spans_tokens_and_bytes_ends_a_text():
    tokenizer = trained_runs.byte_tokenizer()
    rules = stop_rules.of_tokenizer(tokenizer, ["f \u00e9", "zz"], [5])
    table = rules.table(tokenizer, 264)
    tokens = tokenizer.encode("a def \u00e9x").ids

    states = [0]
    for token in tokens:
        states.append(table[states[-1], token])
    is_end = [state == len(table) - 1 for state in states]
    # "a", " ", "def", " ", two bytes of the letter, "x"
    assert is_end == [False] * 6 + [True, True]
    assert rules.text_of(tokenizer, tokens[:6]) == "a de"
    assert rules.tokens == (0, 5)
    assert (table[:, [0, 5]] == len(table) - 1).all()


def test_first_of_several_strings_ends_the_text():
    tokenizer = trained_runs.byte_tokenizer()
    tokens = tokenizer.encode("one two three").ids
    rules = StopRules(strings=("three", "tw", "none"))
    assert rules.text_of(tokenizer, tokens) == "one "
    assert StopRules().text_of(tokenizer, [*tokens, 0]) == "one two three"
    assert StopRules(tokens=(tokens[-1],)).text_of(tokenizer, tokens) == "one two thre"


def test_strings_need_a_tokenizer_of_bytes():
    words = tokenizers.Tokenizer(models.WordPiece({"a": 0}))
    words.decoder = decoders.WordPiece()
    assert StopRules(tokens=(0,)).table(words, 2).tolist() == [[1, 0], [1, 1]]
    with pytest.raises(ValueError, match="decoder of this one is WordPiece. Stop at"):
        StopRules(strings=("b",)).table(words, 2)
