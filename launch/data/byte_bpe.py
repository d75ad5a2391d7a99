"""Byte-level BPE: trained on the corpus and cached, or the user's own.

Every text can be written in its tokens and read back as it was. A trained vocabulary
depends on the text alone.
"""

from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from launch.data import tokenizer
from launch.data.token_store import AbstractCorpus
from launch.data.whole_texts import END_OF_TEXT


def load(path: str, *, vocab_size: int) -> tokenizers.Tokenizer:
    """Returns the user's tokenizer.

    Args:
        path: A ``tokenizer.json``.
        vocab_size: Tokens that the model has.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no tokenizer, lacks `END_OF_TEXT`, or has more tokens than
            the model.
    """
    found = tokenizer.open_file(path)
    tokenizer.check_tokens(
        path, found, vocab_size=vocab_size, needed=(END_OF_TEXT,), model="GPT-2"
    )
    return found


def _train(corpus: AbstractCorpus, vocab_size: int) -> tokenizers.Tokenizer:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # what is seen once need not be a token
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_texts(corpus), trainer)
    return trained


def _texts(corpus: AbstractCorpus) -> Iterator[str]:
    for document in corpus.documents():
        yield from document


BYTE_BPE = tokenizer.Kind(
    name="byte_bpe",
    code=__file__,
    min_vocab_size=257,  # the bytes, and the end of a text
    typical="8192 to 50257",
    train=_train,
)
