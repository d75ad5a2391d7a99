"""When a generated text ends: at a token, or once it contains a given string.

A string may begin and end anywhere inside tokens, so that tokens cannot simply be
compared. Instead a finite automaton (Aho and Corasick, 1975) reads the bytes of the
text. As a table over whole tokens it takes one look-up per token, in a compiled loop.
"""

from collections.abc import Mapping, Sequence

import numpy as np


def build_table(
    stop_tokens: Sequence[int],
    stop_strings: Sequence[bytes],
    token_bytes: Mapping[int, bytes],
    *,
    num_tokens: int,
) -> np.ndarray:
    """Returns the automaton, int32 ``(S, V)``: the state after each token.

    A text begins in state 0 and has ended in state ``S - 1``, which is never left.

    Args:
        stop_tokens: Each ends a text.
        stop_strings: Each ends a text that contains it, none of them empty.
        token_bytes: What each token writes; one that is left out writes nothing.
        num_tokens: ``V``, one more than the largest token.

    Raises:
        ValueError: If a stop token is no token, or a string is empty.

    Example:
        >>> build_table([3], [b"aa"], {0: b"a", 1: b"b", 2: b"ba"}, num_tokens=4)
        array([[1, 0, 1, 2],
               [2, 0, 1, 2],
               [2, 2, 2, 2]], dtype=int32)
    """
    if unknown := [token for token in stop_tokens if not 0 <= token < num_tokens]:
        raise ValueError(
            f"The stop tokens {unknown} are none of the {num_tokens} tokens of the"
            f" model. Use tokens from 0 to {num_tokens - 1}."
        )
    if b"" in stop_strings:
        raise ValueError(
            "A stop string is empty, and every text contains it. Leave it out, or"
            " generate nothing."
        )
    next_state = _read_bytes(stop_strings)
    num_states = len(next_state)
    letters_VJ, lengths_V = _to_rectangle(token_bytes, num_tokens)
    table = np.broadcast_to(np.arange(num_states)[:, None], (num_states, num_tokens))
    for j, letter_V in enumerate(letters_VJ.T):
        table = np.where(j < lengths_V, next_state[table, letter_V], table)
    table = table.astype(np.int32)
    table[:, list(stop_tokens)] = num_states - 1
    return table


def _read_bytes(strings: Sequence[bytes]) -> np.ndarray:
    """Returns the automaton over bytes, ``(S, 256)``; the last state is the end."""
    prefixes = {b"": 0}
    for string in strings:
        for length in range(1, len(string)):
            prefixes.setdefault(string[:length], len(prefixes))
    end = len(prefixes)
    next_state = np.full((end + 1, 256), end)
    for prefix, state in prefixes.items():
        for letter in range(256):
            text = prefix + bytes([letter])
            if not any(text.endswith(string) for string in strings):
                # The longest end of the text with which a string may still come.
                ends = (text[start:] for start in range(len(text) + 1))
                next_state[state, letter] = next(
                    prefixes[part] for part in ends if part in prefixes
                )
    return next_state


def _to_rectangle(
    token_bytes: Mapping[int, bytes], num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of all tokens, 0 past the end of each, and their lengths."""
    lengths_V = np.zeros(num_tokens, np.int32)
    longest = max(map(len, token_bytes.values()), default=0)
    letters_VJ = np.zeros((num_tokens, longest), np.uint8)
    for token, text in token_bytes.items():
        lengths_V[token] = len(text)
        letters_VJ[token, : len(text)] = np.frombuffer(text, np.uint8)
    return letters_VJ, lengths_V
