"""GPT-2's data: text to rows of tokens, see `launch.data.packed_samples`."""

import jax

from launch import input_pipeline
from launch.data import (
    byte_bpe,
    cache,
    draws,
    packed_samples,
    token_store,
    tokenizer,
    whole_texts,
)
from launch.data.packed_samples import PackedSamples
from launch.input_pipeline import Splits
from launch.run_config import DataConfig
from models.gpt2 import Gpt2Config

FIELDS = frozenset(
    "files validation_files tokenizer cache_dir seq_length validation_fraction"
    " separate_documents num_workers".split()
)


def open_splits(data: DataConfig, model: Gpt2Config, seed: int) -> Splits:
    """Returns what to train on, after tokenizing the corpus unless that is cached.

    Args:
        data: What to train on.
        model: A trained tokenizer has at most its ``vocab_size`` tokens.
        seed: Of the split and of the order in which documents are packed.

    Raises:
        FileNotFoundError: If files are missing; all of them are named.
        ValueError: If a file cannot be read, the corpus is too small, the tokenizer
            does not fit the model, or the cache cannot be written.
    """
    cache_dir = cache.directory(data.cache_dir)
    texts = whole_texts.open_texts(data.files, cache_dir)
    if data.tokenizer is None:
        tokens = tokenizer.train(
            texts, cache_dir, vocab_size=model.vocab_size, kind=byte_bpe.BYTE_BPE
        )
    else:
        tokens = byte_bpe.load(data.tokenizer, vocab_size=model.vocab_size)
    ids = tokens.get_vocab(with_added_tokens=True)
    num_tokens = max(ids.values()) + 1
    store = token_store.tokenize(texts, tokens, cache_dir)
    held_from = store
    if data.validation_files:
        others = whole_texts.open_texts(
            data.validation_files, cache_dir, "data.validation_files"
        )
        held_from = token_store.tokenize(others, tokens, cache_dir)
    documents = token_store.split(
        store, held_from, fraction=data.validation_fraction, seed=seed
    )
    train, validation = (
        PackedSamples.pack(
            source,
            draws.shuffle(part, seed=seed),
            seq_length=data.seq_length,
            end_of_text=ids[whole_texts.END_OF_TEXT],
            separates=data.separate_documents,
            is_whole=is_whole,
        )
        for source, part, is_whole in zip(
            (store, held_from), documents, (False, True), strict=True
        )
    )
    _check_size(data, texts.name, train, validation)
    return Splits(
        train=train,
        validation=validation,
        fingerprint=token_store.fingerprint(store, held_from),
        tokenizer=tokens,
        summary=(
            f"{texts.name}: {len(train.documents):,} documents to train on with"
            f" {train.num_tokens:,} tokens of {num_tokens:,}, {len(train):,} samples"
            f" an epoch; {len(validation.documents):,} documents held out,"
            f" {len(validation):,} samples"
        ),
    )


def batch_shapes(
    data: DataConfig, model: Gpt2Config, global_batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of a global batch, without looking at the corpus."""
    shapes = packed_samples.shapes(
        data.seq_length, global_batch_size, separates=data.separate_documents
    )
    return input_pipeline.structs(shapes)


def _check_size(
    data: DataConfig, name: str, train: PackedSamples, validation: PackedSamples
) -> None:
    """Checks that there is a row to train on, and something held out if asked for."""
    num_documents = len(train.documents) + len(validation.documents)
    if len(train) == 0:
        raise ValueError(
            f"The corpus, {name}, is smaller than a sample: of its {num_documents}"
            f" documents {len(train.documents)} are to be trained on, with"
            f" {train.num_tokens} tokens. It needs {data.seq_length} for"
            f" data.seq_length={data.seq_length}. Add text: more files, JSON lines, or"
            f" {whole_texts.END_OF_TEXT!r} between documents; or change"
            f" data.validation_fraction={data.validation_fraction},"
            f" data.validation_files={data.validation_files} or data.seq_length."
        )
