"""Scores of texts are sums of the model's own log-probabilities."""

import jax
import numpy as np
import pytest

from launch import scoring
from launch.trained import open_trained
from models import stacked
from models.gpt2 import Gpt2
from tests.launch import trained_runs

MAX_LEN = 48


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a GPT-2, and its parameters."""
    directory = tmp_path_factory.mktemp("gpt2")
    state = trained_runs.make(directory, tokenizer=trained_runs.byte_tokenizer())
    return str(directory), state.params


@pytest.fixture(scope="module")
def log_probs(run):
    """The log-probabilities ``(L, V)`` after each token of a text, by the model."""
    config = open_trained(run[0]).config.model
    model = stacked.stack(lambda rngs: Gpt2(config, rngs=rngs))

    @jax.jit
    def of(params, tokens_BL):
        outer, batch = dict(params), {"tokens": tokens_BL}
        blocks = outer.pop("blocks")
        x_BLD = model.embed(outer, batch, None)
        for layer in range(2):
            block = jax.tree.map(lambda leaf, i=layer: leaf[i], blocks)
            x_BLD = model.block(block, x_BLD, model.context(batch, None), layer)
        logits = model.read(outer, x_BLD, batch, lambda model, x, _: model.logits(x))
        return jax.nn.log_softmax(logits)

    def of_text(text):
        tokens = np.zeros((1, MAX_LEN), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(of(run[1], tokens))[0, : len(text)]

    return of_text


def make_text(seed, length):
    return np.random.default_rng(seed).integers(1, 259, length).tolist()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=["one_device", "dp2_tp2"])
def test_score_is_the_sum_of_the_log_probabilities(run, log_probs, sizes):
    data, tensor = sizes
    trained = open_trained(run[0], data_parallel_size=data, tensor_parallel_size=tensor)
    lengths = [(1, 1), (3, 5), (20, 4), (44, 5), (2, 0), (7, 1), (60, 3)]
    pieces = [
        (make_text(i, context), make_text(-i - 1 + 100, following))
        for i, (context, following) in enumerate(lengths)
    ]
    best = int(log_probs([7, 8]).argmax(-1)[-1])
    pieces += [([7, 8], [best]), ([7, 8], [best, (best + 1) % 250 + 1])]

    found = scoring.build(trained, global_batch_size=4).score(pieces)

    for (context, following), score in zip(pieces, found, strict=True):
        whole = [*context, *following][-(MAX_LEN + 1) :]
        first = len(whole) - len(following)
        table = log_probs(whole[:-1])
        places = np.arange(first - 1, len(whole) - 1)
        expected = table[places, whole[first:]].sum()
        assert score.log_prob == pytest.approx(expected, rel=1e-5, abs=1e-5)
        is_best = table[places].argmax(-1) == np.array(whole[first:])
        assert score.is_greedy == is_best.all()
    assert [score.is_greedy for score in found[-2:]] == [True, False]


def test_text_of_any_length_is_scored_in_windows(run, log_probs):
    texts = [make_text(1, 5), make_text(2, 100), make_text(3, 48), []]

    found = scoring.build(open_trained(run[0])).score_texts(texts, prefix=0)

    for text, log_prob in zip(texts, found, strict=True):
        expected = 0.0
        for start in range(0, len(text), MAX_LEN):
            end = min(start + MAX_LEN, len(text))
            whole = [0, *text[:end]][-(MAX_LEN + 1) :]
            table = log_probs(whole[:-1])
            places = np.arange(len(whole) - 1)[-(end - start) :]
            expected += table[places, text[start:end]].sum()
        assert log_prob == pytest.approx(expected, rel=1e-5)


def test_windows_ask_for_every_token_once_with_as_much_context_as_fits():
    text = list(range(1, 24))
    for max_len in (1, 2, 5, 23, 40):
        pieces = list(scoring.windows(text, 0, max_len))
        assert [t for _, following in pieces for t in following] == text
        for context, following in pieces:
            assert [0, *text][following[0] - len(context) : following[-1] + 1] == [
                *context,
                *following,
            ]
            is_full = len(context) + len(following) == max_len + 1
            assert is_full or context[0] == 0


def test_what_cannot_be_scored_is_an_error(run):
    trained = open_trained(run[0], data_parallel_size=2)
    with pytest.raises(ValueError, match="global_batch_size=3 is not a positive multi"):
        scoring.build(trained, global_batch_size=3)
    scorer = scoring.build(trained)
    with pytest.raises(ValueError, match="Piece 1 has no context, and a model cannot"):
        scorer.score([([1], [2]), ([], [2])])
    with pytest.raises(
        ValueError, match="Piece 0 asks for 49 tokens, more than the 48"
    ):
        scorer.score([([1], [2] * 49)])
