"""WordPiece: trained on the corpus and cached, or the user's own.

A trained vocabulary depends on the text alone, not on threads or hash order.
"""

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from launch.data import cache
from launch.data.token_store import AbstractCorpus

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"
_DOCUMENTS_PER_BATCH = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What making samples needs to know of a tokenizer.

    Attributes:
        size: One more than the largest token id.
        pad: The id of ``[PAD]``; the other special ones likewise.
        cls: See ``pad``.
        sep: See ``pad``.
        mask: See ``pad``.
        is_continuation: Boolean ``(size,)``: the token continues a word.
        ordinary: Ids that may replace a token: all but special and unused ones.
    """

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    is_continuation: np.ndarray
    ordinary: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Tokenizers that are trained in one way.

    Attributes:
        name: In the names of files.
        code: The module that trains them, its ``__file__``.
        min_vocab_size: Tokens that they have at least.
        typical: How many they have as a rule, for messages.
        train: Returns one of a corpus, with so many tokens at most.
    """

    name: str
    code: str
    min_vocab_size: int
    typical: str
    train: Callable[[AbstractCorpus, int], tokenizers.Tokenizer]


def train(
    corpus: AbstractCorpus,
    cache_dir: pathlib.Path,
    *,
    vocab_size: int,
    kind: Kind | None = None,
) -> tokenizers.Tokenizer:
    """Returns a tokenizer of the corpus, trained or cached.

    Args:
        corpus: All of it, the validation split too, is read.
        cache_dir: Where the tokenizer is kept, as a ``tokenizer.json``.
        vocab_size: Tokens at most; a small corpus gives fewer.
        kind: How it is trained; None for lower-case WordPiece.

    Raises:
        ValueError: If ``vocab_size`` is below what the kind needs, or the corpus cannot
            be read, or the cache not written.
    """
    kind = kind or WORDPIECE
    if vocab_size < kind.min_vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} leaves no room for a trained vocabulary."
            f" Use at least {kind.min_vocab_size}, typically {kind.typical}."
        )
    key = hashlib.sha256()
    for code in (__file__, kind.code):
        key.update(pathlib.Path(code).read_bytes())
    key.update(f"{tokenizers.__version__} {corpus.fingerprint}".encode())
    name = f"{kind.name}-{vocab_size}-{key.hexdigest()[:16]}.json"

    def write(path: pathlib.Path) -> None:
        # Not by `Tokenizer.save`: a full disk is to be an OSError.
        trained = kind.train(corpus, vocab_size)
        path.write_text(trained.to_str(pretty=True), encoding="utf-8")

    return tokenizers.Tokenizer.from_file(str(cache.entry(cache_dir, name, write)))


def load(path: str, *, vocab_size: int, masks_words: bool) -> tokenizers.Tokenizer:
    """Returns the user's tokenizer.

    Args:
        path: A ``tokenizer.json``, or a ``vocab.txt`` of WordPiece, a token per line:
            one with capital letters is taken to keep them and accents, one without to
            drop both.
        vocab_size: Tokens that the model has.
        masks_words: Samples mask whole words, which WordPiece alone tells apart.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no tokenizer, lacks a special token, has more tokens than
            the model, or does not mark the pieces of a word.
    """
    tokenizer = open_file(path)
    check_tokens(
        path, tokenizer, vocab_size=vocab_size, needed=SPECIAL_TOKENS, model="BERT"
    )
    if masks_words and not isinstance(tokenizer.model, models.WordPiece):
        raise ValueError(
            f"data.tokenizer='{path}' is a {type(tokenizer.model).__name__} model,"
            " which does not mark what continues a word. Set data.masking='token',"
            " or use a WordPiece tokenizer."
        )
    return tokenizer


def open_file(path: str) -> tokenizers.Tokenizer:
    """Returns the tokenizer in a file, see `load`."""
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(
            f"data.tokenizer='{path}' is not a file. Name a tokenizer.json or a"
            " vocab.txt, or leave it out to train one on the corpus."
        )
    is_json = path.endswith(".json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path) if is_json else _read(path)
    except Exception as error:  # the library raises no narrower one
        raise ValueError(
            f"data.tokenizer='{path}' is not a"
            f" {'tokenizer.json' if is_json else 'vocab.txt, a token per line'}:"
            f" {error}. Name one that is, or leave it out to train one on the corpus."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_tokens(
    path: str,
    tokenizer: tokenizers.Tokenizer,
    *,
    vocab_size: int,
    needed: Sequence[str],
    model: str,
) -> None:
    """Checks that a tokenizer fits the model.

    Raises:
        ValueError: If it lacks one of the tokens that ``model`` needs, or has more than
            ``vocab_size``.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if missing := [token for token in needed if token not in ids]:
        raise ValueError(
            f"data.tokenizer='{path}' has no {', '.join(missing)} among its {len(ids)}"
            f" tokens. {model} needs {', '.join(needed)}: add them to the file."
        )
    size = max(ids.values()) + 1
    if size > vocab_size:
        raise ValueError(
            f"data.tokenizer='{path}' has {size} tokens, more than"
            f" model.vocab_size={vocab_size}. Set model.vocab_size={size}, or use a"
            " smaller tokenizer."
        )


def vocabulary(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    """Returns the tables of a tokenizer that has the `SPECIAL_TOKENS`."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = max(ids.values()) + 1
    model = tokenizer.model
    is_wordpiece = isinstance(model, models.WordPiece)
    prefix = model.continuing_subword_prefix if is_wordpiece else None
    is_continuation = np.zeros(size, bool)
    if prefix:
        continuing = [id for token, id in ids.items() if token.startswith(prefix)]
        is_continuation[continuing] = True
    special = set(SPECIAL_TOKENS) | {
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.special
    }
    ordinary = sorted(
        id
        for token, id in ids.items()
        if token not in special and not token.startswith("[unused")
    )
    pad, _, cls, sep, mask = (ids[token] for token in SPECIAL_TOKENS)
    return Vocabulary(
        size=size,
        pad=pad,
        cls=cls,
        sep=sep,
        mask=mask,
        is_continuation=is_continuation,
        ordinary=np.array(ordinary, np.int32),
    )


def _read(path: str) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a ``vocab.txt``."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    tokens = [line.strip() for line in text.rstrip().split("\n")]
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        counts = collections.Counter(tokens)
        repeated = [token for token, count in counts.items() if count > 1][:5]
        raise ValueError(f"lines are repeated: {repeated}")
    ordinary = (token for token in ids if not token.startswith("["))
    is_cased = any(token != token.lower() for token in ordinary)
    return _wordpiece(ids, lowercase=not is_cased)


def _wordpiece(ids: dict[str, int], *, lowercase: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token="[UNK]", continuing_subword_prefix=CONTINUATION)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION)
    tokenizer.add_special_tokens([token for token in SPECIAL_TOKENS if token in ids])
    return tokenizer


def _train(corpus: AbstractCorpus, vocab_size: int) -> tokenizers.Tokenizer:
    # The trainer numbers '##x' as it meets them in a hash map, and breaks ties between
    # merges by number. Numbering every letter before it starts makes the result one.
    # Half of the vocabulary at most goes to letters, which matters for Chinese.
    alphabet = _alphabet(corpus, limit=vocab_size // 4)
    inner = [f"{CONTINUATION}{letter}" for letter in alphabet if _joins(letter)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *inner],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    tokenizer = _wordpiece({}, lowercase=True)
    tokenizer.train_from_iterator(_batches(corpus), trainer)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    # Anew, since the trainer takes '##x' for special tokens.
    return _wordpiece(ids, lowercase=True)


WORDPIECE = Kind(
    name="wordpiece",
    code=__file__,
    min_vocab_size=64,
    typical="8192 to 32768",
    train=_train,
)


def _alphabet(corpus: AbstractCorpus, *, limit: int) -> list[str]:
    """Returns the most frequent characters after normalization, in order."""
    raw: collections.Counter[str] = collections.Counter()
    for texts in _batches(corpus):
        raw.update("".join(texts))
    normalizer = normalizers.BertNormalizer(lowercase=True)
    counts: collections.Counter[str] = collections.Counter()
    for character, count in raw.items():
        for normalized in normalizer.normalize_str(character).strip():
            counts[normalized] += count
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    return sorted(ranked[:limit])


def _joins(letter: str) -> bool:
    """Whether a word can have the letter after its first, unlike '.' and '字'."""
    text = normalizers.BertNormalizer().normalize_str(f"a{letter}")
    return len(pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)) == 1


def _batches(corpus: AbstractCorpus) -> Iterator[list[str]]:
    texts: list[str] = []
    for sentences in corpus.documents():
        texts.append(" ".join(sentences))
        if len(texts) == _DOCUMENTS_PER_BATCH:
            yield texts
            texts = []
    yield texts
