"""What ends a generated text, in terms of a tokenizer; see `models.stopping`."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders

from launch.data.whole_texts import END_OF_TEXT
from models import stopping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a text ends.

    Attributes:
        tokens: Each ends a text.
        strings: Each ends a text that contains it.
    """

    tokens: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()

    def table(self, tokenizer: tokenizers.Tokenizer, num_tokens: int) -> np.ndarray:
        """Returns the automaton, int32 ``(S, V)``.

        Args:
            tokenizer: Says what each token writes.
            num_tokens: Of the model, padding included: ``V``.

        Raises:
            ValueError: If a token is none of the model, a string is empty, or the
                tokenizer does not write bytes.
        """
        return stopping.build_table(
            self.tokens,
            [string.encode() for string in self.strings],
            token_bytes(tokenizer) if self.strings else {},
            num_tokens=num_tokens,
        )

    def text_of(self, tokenizer: tokenizers.Tokenizer, tokens: Sequence[int]) -> str:
        """Returns the text of tokens without what has ended it.

        Example:
            >>> from tokenizers import Tokenizer, decoders, models
            >>> letters = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
            >>> letters.decoder = decoders.ByteLevel()
            >>> StopRules(tokens=(2,)).text_of(letters, [0, 1, 2])
            'ab'
            >>> StopRules(strings=("bc",)).text_of(letters, [0, 0, 1, 2])
            'aa'
        """
        if tokens and tokens[-1] in self.tokens:
            tokens = tokens[:-1]
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        ends = [text.find(string) for string in self.strings]
        return text[: min((end for end in ends if end >= 0), default=len(text))]


def of_tokenizer(
    tokenizer: tokenizers.Tokenizer,
    strings: Sequence[str] = (),
    tokens: Sequence[int] = (),
) -> StopRules:
    """Returns the given rules, and the end of a text if the tokenizer knows one."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    known = () if end is None else (end,)
    return StopRules(
        tokens=tuple(dict.fromkeys((*known, *tokens))), strings=tuple(strings)
    )


def token_bytes(tokenizer: tokenizers.Tokenizer) -> Mapping[int, bytes]:
    """Returns what each token writes; special tokens write nothing.

    Raises:
        ValueError: If the tokenizer is not one of bytes.
    """
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        kind = type(tokenizer.decoder).__name__
        raise ValueError(
            "Stop strings need a byte-level tokenizer, which GPT-2 has, but the decoder"
            f" of this one is {kind}. Stop at tokens instead."
        )
    added = tokenizer.get_added_tokens_decoder()
    letters = _byte_of_letter()
    found = {}
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number not in added:
            found[number] = bytes(letters[letter] for letter in token)
        elif not added[number].special:
            found[number] = token.encode()
    return found


def _byte_of_letter() -> dict[str, int]:
    """Returns the byte for which each letter stands in byte-level tokens.

    A byte that Latin-1 prints stands for itself; the others follow, from 256 on.
    """
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printed)
    table = {chr(byte): byte for byte in sorted(printed)}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
