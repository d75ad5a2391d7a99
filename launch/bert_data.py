"""BERT's data: text to masked pairs of segments, see `launch.data.bert_samples`."""

import pathlib

import jax
import numpy as np

from launch import input_pipeline
from launch.data import bert_samples, cache, corpus, token_store, tokenizer
from launch.data.bert_samples import BertSamples, Recipe
from launch.data.token_store import TokenStore
from launch.input_pipeline import TRAIN, VALIDATION, Splits
from launch.run_config import DataConfig
from models.bert import BertConfig

FIELDS = frozenset(
    "files validation_files tokenizer cache_dir seq_length validation_fraction"
    " masked_fraction masking short_fraction num_workers".split()
)


def open_splits(data: DataConfig, model: BertConfig, seed: int) -> Splits:
    """Returns what to train on, after tokenizing the corpus unless that is cached.

    Args:
        data: What to train on.
        model: A trained tokenizer has at most its ``vocab_size`` tokens.
        seed: Of the split and the samples; below 2**32.

    Raises:
        FileNotFoundError: If files are missing; all of them are named.
        ValueError: If a file cannot be read, the corpus is too small, the tokenizer
            does not fit the model, or the cache cannot be written.
    """
    recipe = _recipe(data)
    cache_dir = cache.directory(data.cache_dir)
    text = corpus.open_corpus(data.files, cache_dir)
    if data.tokenizer is None:
        tokens = tokenizer.train(text, cache_dir, vocab_size=model.vocab_size)
    else:
        masks_words = data.masking != "token"
        tokens = tokenizer.load(
            data.tokenizer, vocab_size=model.vocab_size, masks_words=masks_words
        )
    store = token_store.tokenize(text, tokens, cache_dir)
    vocabulary = tokenizer.vocabulary(tokens)
    held_from = _open_held_out(data, store, tokens, cache_dir)
    stores = store, held_from
    documents = bert_samples.split_documents(
        store,
        validation_fraction=data.validation_fraction,
        seed=seed,
        held_from=held_from,
    )
    _check_size(data, text.name, stores, documents)

    def make_samples(split: int) -> BertSamples:
        length = recipe.seq_length - bert_samples.NUM_SPECIAL
        return BertSamples(
            recipe=recipe,
            store=stores[split],
            vocabulary=vocabulary,
            spans=bert_samples.cut_spans(stores[split], documents[split], length),
            seed=2 * seed + split,
        )

    train, validation = make_samples(TRAIN), make_samples(VALIDATION)
    num_tokens = bert_samples.count_tokens(store, documents[TRAIN])
    return Splits(
        train=train,
        validation=validation,
        fingerprint=token_store.fingerprint(store, held_from),
        tokenizer=tokens,
        summary=(
            f"{text.name}: {len(documents[TRAIN]):,} documents to train on with"
            f" {num_tokens:,} tokens of {vocabulary.size:,}, {len(train):,} samples an"
            f" epoch; {len(documents[VALIDATION]):,} documents held out,"
            f" {len(validation):,} samples"
        ),
    )


def batch_shapes(
    data: DataConfig, model: BertConfig, global_batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of a global batch, without looking at the corpus."""
    return input_pipeline.structs(bert_samples.shapes(_recipe(data), global_batch_size))


def _open_held_out(
    data: DataConfig,
    store: TokenStore,
    tokens: tokenizer.tokenizers.Tokenizer,
    cache_dir: pathlib.Path,
) -> TokenStore:
    """Returns the documents that are held out, or of which a part is."""
    if not data.validation_files:
        return store
    others = corpus.open_corpus(
        data.validation_files, cache_dir, "data.validation_files"
    )
    return token_store.tokenize(others, tokens, cache_dir)


def _recipe(data: DataConfig) -> Recipe:
    return Recipe(
        seq_length=data.seq_length,
        masked_fraction=data.masked_fraction,
        masking=data.masking,
        short_fraction=data.short_fraction,
    )


def _check_size(
    data: DataConfig,
    name: str,
    stores: tuple[TokenStore, TokenStore],
    splits: tuple[np.ndarray, np.ndarray],
) -> None:
    """Checks that each split makes at least a sample."""
    needs = data.seq_length - bert_samples.NUM_SPECIAL
    names = "training", "validation"
    for split, store, documents in zip(names, stores, splits, strict=True):
        if split == "validation" and data.validation_fraction == 0:
            continue
        num_tokens = bert_samples.count_tokens(store, documents)
        if len(documents) < 2 or num_tokens < needs:
            raise ValueError(
                f"The corpus, {name}, is smaller than a sample: of its"
                f" {store.num_documents} documents the {split} split has"
                f" {len(documents)} of two sentences or more, {num_tokens} tokens. It"
                f" needs two, and {needs} tokens for data.seq_length={data.seq_length}."
                " Add text, put blank lines between documents, or change"
                f" data.validation_fraction={data.validation_fraction},"
                f" data.validation_files={data.validation_files} or data.seq_length."
            )
