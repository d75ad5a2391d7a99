"""Random batches of each family, in which samples differ in how much they hold."""

import types

import numpy as np

NO_DATA = types.SimpleNamespace(fingerprint="of no data")  # of a run that trains not
VOCAB_SIZE = 60
NUM_PREDICTED = 3


def make(model_name, config, seed):
    """A global batch; the same for equal sizes and seeds."""
    r = np.random.default_rng(seed)
    size = config.train.global_batch_size
    return _MAKERS[model_name](config, r, size)


def _bert(config, r, size):
    length = config.data.seq_length
    num_tokens = r.integers(length // 2, length + 1, (size, 1))
    return {
        "tokens": r.integers(0, VOCAB_SIZE, (size, length), np.int32),
        "segments": r.integers(0, 2, (size, length), np.int32),
        "is_token": np.arange(length)[None] < num_tokens,
        "positions": r.integers(0, length // 2, (size, NUM_PREDICTED), np.int32),
        "targets": r.integers(0, VOCAB_SIZE, (size, NUM_PREDICTED), np.int32),
        "weights": (r.random((size, NUM_PREDICTED)) < 0.7).astype(np.float32),
        "is_random_next": r.integers(0, 2, size, np.int32),
        "sample_weights": (np.arange(size) > 0).astype(np.float32),
    }


def _gpt2(config, r, size):
    length = config.data.seq_length
    tokens = r.integers(0, VOCAB_SIZE, (size, length + 1), np.int32)
    first_of_second = r.integers(1, length, (size, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": (r.random((size, length)) < 0.8).astype(np.float32),
        "documents": (np.arange(length)[None] >= first_of_second).astype(np.int32),
    }


def _vit(config, r, size):
    pixels = config.model.image_size
    shape = (size, pixels, pixels, config.model.num_channels)
    classes = r.integers(0, config.model.num_classes, size)
    return {
        "images": r.standard_normal(shape).astype(np.float32),
        "targets": np.eye(config.model.num_classes, dtype=np.float32)[classes],
        "weights": (np.arange(size) > 0).astype(np.float32),
    }


_MAKERS = {"bert": _bert, "gpt2": _gpt2, "vit": _vit}
