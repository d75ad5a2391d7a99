"""Byte-level BPE: trained on the corpus and cached, or the user's own.

Every text can be written in its tokens and read back as it was. A trained vocabulary
depends on the text alone.
"""

import hashlib
import pathlib
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from launch.data import cache, tokenizer
from launch.data.token_store import AbstractCorpus
from launch.data.whole_texts import END_OF_TEXT

MIN_VOCAB_SIZE = 257  # the bytes, and the end of a text


def train(
    corpus: AbstractCorpus, cache_dir: pathlib.Path, *, vocab_size: int
) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer of the corpus, trained or cached.

    Args:
        corpus: All of it, the validation split too, is read.
        cache_dir: Where the tokenizer is kept, as a ``tokenizer.json``.
        vocab_size: Tokens at most; a small corpus gives fewer.

    Raises:
        ValueError: If ``vocab_size`` is below `MIN_VOCAB_SIZE`, or the corpus cannot be
            read, or the cache not written.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size={vocab_size} leaves no room for a trained vocabulary."
            f" Use at least {MIN_VOCAB_SIZE}, typically 8192 to 50257."
        )
    key = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    key.update(f"{tokenizers.__version__} {corpus.fingerprint}".encode())
    name = f"byte_bpe-{vocab_size}-{key.hexdigest()[:16]}.json"
    path = cache.entry(cache_dir, name, lambda path: _write(path, corpus, vocab_size))
    return tokenizers.Tokenizer.from_file(str(path))


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


def _write(path: pathlib.Path, corpus: AbstractCorpus, vocab_size: int) -> None:
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
    # Not by `Tokenizer.save`: a full disk is to be an OSError.
    path.write_text(trained.to_str(pretty=True), encoding="utf-8")


def _texts(corpus: AbstractCorpus) -> Iterator[str]:
    for document in corpus.documents():
        yield from document
