"""Beam search finds what a search through all texts, or a plain one, finds."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import stopping
from models.beam_search import BeamSearch
from models.generation import Generation
from models.sampling import SamplingConfig
from tests.models import tiny_gpt2
from tests.models.tiny_gpt2 import make_prompts

NUM_TOKENS, NUM_NEW, END = 4, 4, 3
TABLE = stopping.build_table([END], (), {}, num_tokens=NUM_TOKENS)
PROMPTS = ([0], [1], [2])
# A history is a prompt and tokens after it; each has its row of logits.
HISTORIES = {
    (prompt, *tokens): index
    for index, (prompt, tokens) in enumerate(
        (prompt, tokens)
        for (prompt,) in PROMPTS
        for length in range(NUM_NEW)
        for tokens in itertools.product(range(NUM_TOKENS), repeat=length)
    )
}
LOGITS = np.random.default_rng(1).standard_normal((len(HISTORIES), NUM_TOKENS))
LOG_PROBS = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))


class ToyDecoder:
    """A model of four tokens whose scores are drawn anew for every history."""

    def __init__(self):
        following = np.zeros((len(HISTORIES), NUM_TOKENS), np.int32)
        for history, index in HISTORIES.items():
            for token in range(NUM_TOKENS):
                following[index, token] = HISTORIES.get((*history, token), 0)
        self.following = following

    def prefill(self, params, tokens_BL, lengths_B, num_slots):
        start = np.array([HISTORIES[prompt,] for (prompt,) in PROMPTS], np.int32)
        memory = jnp.asarray(start)[tokens_BL[:, 0]]
        return memory, self._logits(memory)

    def step(self, params, memory, tokens_B, positions_B):
        memory = jnp.asarray(self.following)[memory, tokens_B]
        return memory, self._logits(memory)

    def gather(self, memory, rows_B):
        return memory[rows_B]

    def _logits(self, memory):
        return jnp.asarray(LOGITS, jnp.float32)[memory]


def score(text, log_prob, length_penalty):
    return log_prob / len(text) ** length_penalty


@functools.cache
def all_texts(prompt):
    """Every continuation with its log-probability."""
    found, pending = [], [((), 0.0)]
    while pending:
        text, total = pending.pop()
        for token in range(NUM_TOKENS):
            longer = (*text, token)
            now = total + LOG_PROBS[HISTORIES[prompt, *text]][token]
            is_end = token == END or len(longer) == NUM_NEW
            (found if is_end else pending).append((longer, now))
    return found


def plain_search(prompt, num_beams, length_penalty):
    """Beam search as one writes it down, to the last step."""
    beams, finished = [((), 0.0)], []
    for _ in range(NUM_NEW):
        candidates = [
            ((*text, token), total + LOG_PROBS[HISTORIES[prompt, *text]][token])
            for text, total in beams
            for token in range(NUM_TOKENS)
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        finished += [c for c in candidates[:num_beams] if c[0][-1] == END]
        beams = [c for c in candidates if c[0][-1] != END][:num_beams]
    last = [c for c in candidates[:num_beams] if c[0][-1] != END]
    return best(finished + last, num_beams, length_penalty)


def best(texts, number, length_penalty):
    scored = [(score(text, total, length_penalty), text) for text, total in texts]
    return sorted(scored, reverse=True)[:number]


@functools.cache
def compile_search(num_beams, length_penalty):
    algorithm = BeamSearch(
        decoder=ToyDecoder(),
        num_beams=num_beams,
        max_new_tokens=NUM_NEW,
        length_penalty=length_penalty,
    )

    def run(prompts):
        state = algorithm.start(None, prompts, jnp.asarray(TABLE))
        return algorithm.finish(None, prompts, jnp.asarray(TABLE), state)

    return jax.jit(run)


def search(num_beams, length_penalty):
    run = compile_search(num_beams, length_penalty)
    return jax.device_get(run(make_prompts(PROMPTS)))


def assert_finds(found, row, expected):
    scores = [wanted for wanted, _ in expected]
    np.testing.assert_allclose(found.scores[row], scores, rtol=1e-5)
    for tokens, num_new, (_, text) in zip(
        found.tokens[row], found.num_new[row], expected, strict=True
    ):
        assert num_new == len(text)
        assert tuple(tokens) == text + (0,) * (NUM_NEW - len(text))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_with_a_beam_for_every_text_it_is_a_search_through_all(length_penalty):
    num_beams = NUM_TOKENS ** (NUM_NEW - 1)
    found = search(num_beams, length_penalty)
    for row, (prompt,) in enumerate(PROMPTS):
        expected = best(all_texts(prompt), num_beams, length_penalty)
        assert_finds(found, row, expected)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("num_beams", [2, 3])
def test_fewer_beams_find_what_a_plain_search_finds(num_beams, length_penalty):
    found = search(num_beams, length_penalty)
    for row, (prompt,) in enumerate(PROMPTS):
        assert_finds(found, row, plain_search(prompt, num_beams, length_penalty))


def test_fewer_beams_miss_what_begins_badly():
    [_, (second, _)] = best(all_texts(0), 2, 0.0)
    assert search(2, 0.0).scores[0, 1] < second - 0.5


def test_cache_follows_its_beam():
    texts = ([3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5])
    table = stopping.build_table([2, 8], (), {}, num_tokens=12)
    fields = dict(num_beams=3, max_new_tokens=9, repetition_penalty=1.2)
    found = {
        decoder: tiny_gpt2.run(
            BeamSearch, make_prompts(texts), table, decoder=decoder, **fields
        )
        for decoder in tiny_gpt2.DECODERS
    }
    cached, recomputed = found["cached"], found["recomputing"]
    np.testing.assert_array_equal(cached.tokens, recomputed.tokens)
    np.testing.assert_allclose(cached.scores, recomputed.scores, rtol=1e-5)
    assert len({tuple(tokens) for tokens in cached.tokens.reshape(-1, 9)}) == 9


def test_one_beam_takes_the_best_token_every_time():
    texts = ([3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5])
    prompts = make_prompts(texts)
    fields = dict(max_new_tokens=9)
    found = tiny_gpt2.run(BeamSearch, prompts, num_beams=1, **fields)
    greedy = tiny_gpt2.run(Generation, prompts, sampling=SamplingConfig(), **fields)
    np.testing.assert_array_equal(found.tokens[:, 0], greedy.tokens)
    assert (found.num_new == 9).all()


def test_row_that_is_no_text_has_no_beams():
    prompts = dataclasses.replace(
        make_prompts(PROMPTS), ends=jnp.array([0, 1, 1], jnp.int32)
    )
    found = jax.device_get(compile_search(2, 1.0)(prompts))
    assert np.isneginf(found.scores[1:]).all()
    assert (found.num_new[1:] == 0).all()
    np.testing.assert_array_equal(found.tokens[0], search(2, 1.0).tokens[0])
