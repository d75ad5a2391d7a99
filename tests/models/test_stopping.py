"""The automaton ends a text where a plain search would find the string."""

import numpy as np
import pytest

from models.stopping import build_table

TOKEN_BYTES = {
    0: b"a",
    1: b"b",
    2: b"ab",
    3: b"ba",
    4: b"bbb",
    5: b"aab",
    7: b"\xff\x00",
}
NUM_TOKENS = 8  # token 6 writes nothing


def find_end(table, tokens):
    """Returns how many tokens are read until the text has ended, None for never."""
    state = 0
    for number, token in enumerate(tokens, start=1):
        state = table[state, token]
        if state == len(table) - 1:
            return number
    return None


@pytest.mark.parametrize(
    "strings",
    [
        (b"a",),
        (b"abab",),
        (b"aabaa", b"bbb"),
        (b"abba", b"bb", b"aaa"),
        (b"ab", b"xabx"),
        (b"a\xff", b"\x00b"),
        (b"babab", b"abaa", b"babbb"),
    ],
    ids=repr,
)
def test_text_ends_with_the_token_that_completes_a_string(strings):
    table = build_table((), strings, TOKEN_BYTES, num_tokens=NUM_TOKENS)
    random = np.random.default_rng(0)
    ends = []
    for _ in range(200):
        tokens = random.integers(0, NUM_TOKENS, 12)
        expected, text = None, b""
        for number, token in enumerate(tokens, start=1):
            text += TOKEN_BYTES.get(token, b"")
            if any(string in text for string in strings):
                expected = number
                break
        assert find_end(table, tokens) == expected
        ends.append(expected)
    assert len(set(ends)) > 2


def test_stop_token_ends_a_text_in_any_state_and_the_end_is_never_left():
    table = build_table([6, 3], [b"abb"], TOKEN_BYTES, num_tokens=NUM_TOKENS)
    assert (table[:, [3, 6]] == 3).all()
    assert (table[3] == 3).all()
    assert find_end(table, [0, 1, 6, 0]) == 3


def test_without_rules_no_text_ends():
    assert build_table((), (), TOKEN_BYTES, num_tokens=3 + 5).tolist() == [
        [0] * 8,
        [1] * 8,
    ]


def test_rule_that_cannot_be_met_is_an_error():
    with pytest.raises(ValueError, match=r"stop tokens \[9\] are none of the 8 tokens"):
        build_table([0, 9], (), {}, num_tokens=8)
    with pytest.raises(ValueError, match="A stop string is empty, and every text"):
        build_table((), (b"",), {}, num_tokens=8)
