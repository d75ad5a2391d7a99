"""A tokenized corpus on disk, as flat arrays that are mapped, not read.

A sentence is a run of tokens, a document a run of sentences, so three arrays hold a
corpus of any size: the tokens, where each sentence starts, where each document starts.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import tokenizers

from launch.data import cache, draws

Document = Sequence[str]

_SENTENCES_PER_PART = 4096
_CHARACTERS_PER_PART = 2**22
_ARRAYS = ("tokens", "sentence_starts", "document_starts", "document_hashes")
_FACTS = "facts.json"


class AbstractCorpus(Protocol):
    """Documents of sentences, each at least one character.

    Attributes:
        name: For people.
        fingerprint: Digest of the documents.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - above

    @property
    def fingerprint(self) -> str: ...  # noqa: D102 - above

    def documents(self) -> Iterator[Document]:
        """Yields the documents."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """A tokenized corpus. Pickling it copies the path alone.

    Attributes:
        path: The folder of the arrays.
        fingerprint: Digest of the tokens; equal stores have equal ones.
        tokens: uint16 or int32 ``(num_tokens,)``.
        sentence_starts: int64 ``(num_sentences + 1,)``: sentence ``s`` has the tokens
            from ``sentence_starts[s]`` up to ``sentence_starts[s + 1]``, at least one.
        document_starts: int64 ``(num_documents + 1,)``, the same of sentences.
        document_hashes: uint64 ``(num_documents,)``: equal documents have equal ones.
    """

    path: pathlib.Path
    fingerprint: str
    tokens: np.ndarray = dataclasses.field(repr=False)
    sentence_starts: np.ndarray = dataclasses.field(repr=False)
    document_starts: np.ndarray = dataclasses.field(repr=False)
    document_hashes: np.ndarray = dataclasses.field(repr=False)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open_store, (self.path,)

    @property
    def num_documents(self) -> int:
        """Documents with at least one token."""
        return len(self.document_hashes)


def open_store(path: pathlib.Path) -> TokenStore:
    """Returns the store in a folder that `tokenize` made."""
    arrays = {name: _map(path / f"{name}.npy") for name in _ARRAYS}
    facts = json.loads((path / _FACTS).read_text())
    return TokenStore(path=path, fingerprint=facts["fingerprint"], **arrays)


def fingerprint(store: TokenStore, held_from: TokenStore) -> str:
    """Returns a digest of both, that of the store if they are the same."""
    if held_from is store:
        return store.fingerprint
    both = f"{store.fingerprint} {held_from.fingerprint}"
    return hashlib.sha256(both.encode()).hexdigest()


def split(
    store: TokenStore,
    held_from: TokenStore,
    *,
    fraction: float,
    seed: int,
    min_sentences: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the documents to train on, and those held out, int64 indices.

    Equal documents are on the same side, so that none is trained on and held out.

    Args:
        store: To train on.
        held_from: Whose documents are held out, all of them; ``store`` itself to hold
            out a part.
        fraction: Of the documents to hold out, if a part is, rounded up.
        seed: Decides which.
        min_sentences: Documents of fewer are in neither.
    """
    documents, others = (
        np.flatnonzero(np.diff(one.document_starts) >= min_sentences)
        for one in (store, held_from)
    )
    hashes = store.document_hashes[documents]
    if held_from is store:
        is_held_out = draws.is_held_out(hashes, fraction=fraction, seed=seed)
        return documents[~is_held_out], documents[is_held_out]
    return documents[~np.isin(hashes, held_from.document_hashes)], others


def tokenize(
    corpus: AbstractCorpus, tokenizer: tokenizers.Tokenizer, cache_dir: pathlib.Path
) -> TokenStore:
    """Returns the tokens of a corpus, from the cache if they are there.

    Raises:
        ValueError: If the corpus cannot be read or the cache not written.
    """
    key = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    key.update(f"{corpus.fingerprint} {tokenizer.to_str()}".encode())
    path = cache.entry(
        cache_dir,
        f"tokens-{key.hexdigest()[:16]}",
        lambda path: _write(path, corpus, tokenizer),
    )
    return open_store(path)


def _map(path: pathlib.Path) -> np.ndarray:
    array = np.load(path, mmap_mode="r")
    return array.view(np.ndarray)  # a plain array indexes faster than a memmap


def _write(
    path: pathlib.Path, corpus: AbstractCorpus, tokenizer: tokenizers.Tokenizer
) -> None:
    path.mkdir()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    dtypes = {
        "tokens": np.uint16 if size <= 2**16 else np.int32,
        "sentence_starts": np.int64,
        "document_starts": np.int64,
        "document_hashes": np.uint64,
    }
    digest = hashlib.sha256()
    num_tokens = num_sentences = 0
    with contextlib.ExitStack() as stack:
        arrays = {
            name: stack.enter_context(_GrowingArray(path / f"{name}.npy", dtype))
            for name, dtype in dtypes.items()
        }
        arrays["sentence_starts"].append([0])
        arrays["document_starts"].append([0])
        for part in _tokenized(corpus, tokenizer):
            hashes = part.hashes()
            digest.update(hashes.tobytes())
            arrays["tokens"].append(part.tokens)
            arrays["sentence_starts"].append(num_tokens + part.lengths.cumsum())
            arrays["document_starts"].append(num_sentences + part.counts.cumsum())
            arrays["document_hashes"].append(hashes)
            num_tokens += len(part.tokens)
            num_sentences += len(part.lengths)
    if not num_tokens:
        raise ValueError(
            f"The tokenizer makes no token of the corpus, {corpus.name}. Give text that"
            " has more than control characters."
        )
    (path / _FACTS).write_text(json.dumps({"fingerprint": digest.hexdigest()}))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Some documents: their tokens, tokens per sentence, sentences per document."""

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray

    def hashes(self) -> np.ndarray:
        """Returns a 64-bit digest of each document."""
        sentence_ends = self.counts.cumsum()
        token_ends = self.lengths.cumsum()[sentence_ends - 1]
        digests = [
            hashlib.blake2b(tokens.tobytes() + lengths.tobytes(), digest_size=8)
            for tokens, lengths in zip(
                np.split(self.tokens, token_ends[:-1]),
                np.split(self.lengths, sentence_ends[:-1]),
                strict=True,
            )
        ]
        return np.frombuffer(b"".join(d.digest() for d in digests), "<u8")


def _tokenized(
    corpus: AbstractCorpus, tokenizer: tokenizers.Tokenizer
) -> Iterator[_Part]:
    """Yields the documents in parts that are tokenized at once, in all threads."""
    documents: list[Document] = []
    num_sentences = num_characters = 0
    for document in corpus.documents():
        documents.append(document)
        num_sentences += len(document)
        num_characters += sum(map(len, document))
        if (
            num_sentences >= _SENTENCES_PER_PART
            or num_characters >= _CHARACTERS_PER_PART
        ):
            yield from _part(documents, tokenizer)
            documents, num_sentences, num_characters = [], 0, 0
    yield from _part(documents, tokenizer)


def _part(
    documents: list[Document], tokenizer: tokenizers.Tokenizer
) -> Iterator[_Part]:
    """Yields the part, unless nothing is left of it without empty sentences."""
    sentences = list(itertools.chain.from_iterable(documents))
    encodings = tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    lengths = np.fromiter(map(len, ids), np.int64)
    document_of = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    counts = np.bincount(document_of[lengths > 0], minlength=len(documents))
    if counts.any():
        yield _Part(
            tokens=np.fromiter(itertools.chain.from_iterable(ids), np.int32),
            lengths=lengths[lengths > 0],
            counts=counts[counts > 0],
        )


class _GrowingArray:
    """A ``.npy`` file of one dimension that is written in parts."""

    def __init__(self, path: pathlib.Path, dtype: npt.DTypeLike):
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self._size = 0
        self._write_header()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # NumPy leaves room in the header for the size to grow.
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def append(self, values: npt.ArrayLike) -> None:
        """Writes the values at the end."""
        array = np.asarray(values).astype(self._dtype)
        self._file.write(array.data)
        self._size += array.size

    def _write_header(self) -> None:
        header = {
            "descr": self._dtype.str,
            "fortran_order": False,
            "shape": (self._size,),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
