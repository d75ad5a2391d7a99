"""Labelled texts as flat arrays of tokens.

They are kept in the cache, and in memory while they are trained on.
"""

import array
import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tokenizers

from launch.data import cache
from launch.data.labelled_texts import Example, LabelledTexts

NO_LABEL = -1
_EXAMPLES_PER_PART = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTokens:
    """Samples as tokens.

    Attributes:
        tokens: int32 ``(num_tokens,)``, without special ones.
        starts: int64 ``(num_samples + 1,)``: sample ``s`` has the tokens from
            ``starts[s]`` up to ``starts[s + 1]``.
        first_sizes: int64 ``(num_samples,)``: tokens of the first text of each; the
            rest are those of the second.
        labels: int32, indices of ``names``: of each sample; or of each token, where
            `NO_LABEL` stands on all pieces of a word but the first.
        names: The labels that there are, each once.
        hashes: uint64 ``(num_samples,)``: samples of equal texts have equal ones.
        sources: uint64 ``(num_samples,)``: those of samples that are held out together
            are equal.
    """

    tokens: np.ndarray
    starts: np.ndarray
    first_sizes: np.ndarray
    labels: np.ndarray
    names: np.ndarray
    hashes: np.ndarray
    sources: np.ndarray

    def __len__(self) -> int:
        return len(self.hashes)


Encoded = list[tuple[list[list[int]], list[int]]]
"""For each sample the tokens of its texts; and for it, or for each of its tokens, which
of its labels it has, or `NO_LABEL`."""
Encode = Callable[[tokenizers.Tokenizer, Sequence[Example]], Encoded]


def encode_texts(
    tokenizer: tokenizers.Tokenizer, examples: Sequence[Example]
) -> Encoded:
    """Encodes each text; the label is that of the sample."""
    texts = list(itertools.chain.from_iterable(each.texts for each in examples))
    found = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    return [([next(found).ids for _ in each.texts], [0]) for each in examples]


def encode_words(
    tokenizer: tokenizers.Tokenizer, examples: Sequence[Example]
) -> Encoded:
    """Encodes words, none of which vanishes; the first piece has the word's label."""
    encodings = tokenizer.encode_batch(
        [list(each.texts) for each in examples],
        is_pretokenized=True,
        add_special_tokens=False,
    )
    unknown = tokenizer.get_vocab()["[UNK]"]
    results = []
    for each, encoding in zip(examples, encodings, strict=True):
        pieces: list[list[int]] = [[] for _ in each.texts]
        for token, word in zip(encoding.ids, encoding.word_ids, strict=True):
            assert word is not None  # nothing was added to the words
            pieces[word].append(token)
        pieces = [found or [unknown] for found in pieces]  # control characters
        tokens = list(itertools.chain.from_iterable(pieces))
        labels = [NO_LABEL] * len(tokens)
        starts = itertools.accumulate(map(len, pieces[:-1]), initial=0)
        for word, start in enumerate(starts):
            labels[start] = word
        results.append(([tokens], labels))
    return results


def tokenize(
    texts: LabelledTexts,
    tokenizer: tokenizers.Tokenizer,
    cache_dir: pathlib.Path,
    encode: Encode,
) -> LabelledTokens:
    """Returns the tokens of samples, from the cache if they are there.

    Raises:
        ValueError: If the samples cannot be read or the cache not written.
    """
    key = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    key.update(f"{texts.fingerprint} {tokenizer.to_str()}".encode())
    path = cache.entry(
        cache_dir,
        f"labelled-{key.hexdigest()[:16]}.npz",
        lambda path: _write(path, from_examples(texts.examples(), tokenizer, encode)),
    )
    with np.load(path) as arrays:
        return LabelledTokens(**arrays)


def fingerprint(store: LabelledTokens) -> str:
    """Returns a digest of the samples and their labels."""
    digest = hashlib.sha256()
    for values in (store.tokens, store.starts, store.labels):
        digest.update(values.tobytes())
    return digest.hexdigest()


def from_examples(
    examples: Iterable[Example], tokenizer: tokenizers.Tokenizer, encode: Encode
) -> LabelledTokens:
    """Returns the tokens of samples."""
    tokens, labels = array.array("i"), array.array("i")
    starts, first_sizes = array.array("q"), array.array("q")
    hashes, sources = array.array("Q"), array.array("Q")
    starts.append(0)
    label_of: dict[str, int] = {}
    for part in _batches(examples):
        encoded = encode(tokenizer, part)
        for example, (texts, indices) in zip(part, encoded, strict=True):
            numbers = [
                label_of.setdefault(name, len(label_of)) for name in example.labels
            ]
            labels.extend(i if i == NO_LABEL else numbers[i] for i in indices)
            for text in texts:
                tokens.extend(text)
            first_sizes.append(len(texts[0]))
            starts.append(len(tokens))
            hashes.append(_hash("\0".join(example.texts)))
            source = example.source
            sources.append(hashes[-1] if source is None else _hash(source))
    return LabelledTokens(
        tokens=np.array(tokens, np.int32),
        starts=np.array(starts, np.int64),
        first_sizes=np.array(first_sizes, np.int64),
        labels=np.array(labels, np.int32),
        names=np.array(list(label_of), np.str_),
        hashes=np.array(hashes, np.uint64),
        sources=np.array(sources, np.uint64),
    )


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    rest = iter(examples)
    while part := list(itertools.islice(rest, _EXAMPLES_PER_PART)):
        yield part


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _write(path: pathlib.Path, found: LabelledTokens) -> None:
    with path.open("wb") as file:
        np.savez(
            file,
            tokens=found.tokens,
            starts=found.starts,
            first_sizes=found.first_sizes,
            labels=found.labels,
            names=found.names,
            hashes=found.hashes,
            sources=found.sources,
        )
