"""Texts are continued as the model that was trained says, one step at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import stopping
from models.generation import Generation
from models.sampling import SamplingConfig
from tests.models import tiny_gpt2
from tests.models.cases import LAYOUT_TOLERANCE
from tests.models.tiny_gpt2 import DECODERS, make_prompts, params

TEXTS = ([3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5])
NUM_NEW = 9
GREEDY = SamplingConfig()
DRAWN = SamplingConfig(temperature=0.9, top_k=8, top_p=0.95, repetition_penalty=1.3)


def keys_of(texts):
    seed = jax.random.key(5)
    return jax.vmap(jax.random.fold_in, (None, 0))(seed, jnp.arange(len(texts)))


def generate(decoder, texts, sampling, table_SV=tiny_gpt2.NEVER, **layout):
    prompts = make_prompts(texts, keys=keys_of(texts), **layout)
    return continue_(prompts, table_SV, decoder=decoder, sampling=sampling)


def continue_(*arguments, sampling, **fields):
    fields |= {"sampling": sampling, "max_new_tokens": NUM_NEW}
    return tiny_gpt2.run(Generation, *arguments, **fields)


@pytest.mark.parametrize("name", DECODERS)
def test_each_step_scores_as_the_model_scores_the_whole_text(name):
    decoder, prompts = DECODERS[name], make_prompts(TEXTS, padding=7)
    continued = np.random.default_rng(0).integers(0, 11, (3, NUM_NEW), np.int32)
    memory, first = jax.jit(decoder.prefill, static_argnums=3)(
        params(), prompts.tokens, prompts.lengths, 7 + NUM_NEW
    )
    step = jax.jit(decoder.step)
    found = [first]
    for n in range(NUM_NEW):
        memory, logits_BV = step(params(), memory, continued[:, n], prompts.lengths + n)
        found.append(logits_BV)

    texts = [
        [*text, *more.tolist()] for text, more in zip(TEXTS, continued, strict=True)
    ]
    expected = tiny_gpt2.logits_of(texts)
    scale = np.abs(expected[:, :, :11]).max()
    for n, logits_BV in enumerate(found):
        wanted = expected[np.arange(3), np.array(prompts.lengths) + n - 1]
        error = np.abs(np.asarray(logits_BV) - wanted)[:, :11].max()
        assert error <= 5 * LAYOUT_TOLERANCE * scale, n


def test_cache_changes_no_token():
    cached = generate("cached", TEXTS, DRAWN)
    recomputed = generate("recomputing", TEXTS, DRAWN)

    np.testing.assert_array_equal(cached.tokens, recomputed.tokens)
    assert len(np.unique(cached.tokens)) > 4


def test_best_token_is_that_of_the_model():
    found = generate("cached", TEXTS, GREEDY).tokens

    texts = [[*text, *more] for text, more in zip(TEXTS, found.tolist(), strict=True)]
    best_BT = tiny_gpt2.logits_of(texts).argmax(-1)
    for text, more, best_T in zip(TEXTS, found, best_BT, strict=True):
        start = len(text) - 1
        np.testing.assert_array_equal(more, best_T[start : start + NUM_NEW])


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["best", "drawn"])
def test_text_depends_on_nothing_but_itself_and_its_key(sampling):
    together = generate("cached", TEXTS, sampling).tokens

    padded = generate("cached", TEXTS, sampling, padding=9).tokens
    np.testing.assert_array_equal(padded, together)
    for index, text in enumerate(TEXTS):
        keys = keys_of(TEXTS)[jnp.full(3, index)]
        prompts = make_prompts([text] * 3, keys=keys, length=7)
        found = continue_(prompts, sampling=sampling).tokens
        np.testing.assert_array_equal(found, together[[index] * 3])


def test_text_is_continued_as_it_would_be_alone():
    together = generate("cached", TEXTS, GREEDY).tokens
    alone = continue_(make_prompts(TEXTS[2:]), sampling=GREEDY).tokens
    np.testing.assert_array_equal(alone, together[2:])


def test_text_ends_at_its_own_end_and_the_loop_with_the_last_one():
    free = generate("cached", TEXTS, DRAWN).tokens
    stop = free[0, 2]
    table = stopping.build_table([stop], (), {}, num_tokens=12)

    ended = generate("cached", TEXTS, DRAWN, table)

    for row, found, num_new in zip(free, ended.tokens, ended.num_new, strict=True):
        places = np.flatnonzero(row == stop)
        expected = places[0] + 1 if len(places) else NUM_NEW
        assert num_new == expected
        np.testing.assert_array_equal(found[:expected], row[:expected])
        assert (found[expected:] == 0).all()
    assert ended.step == ended.num_new.max()
    assert ended.num_new[0] <= 3

    every = stopping.build_table(range(11), (), {}, num_tokens=12)
    assert generate("cached", TEXTS, DRAWN, every).step == 1


def test_row_that_is_no_text_does_not_keep_the_loop_going():
    every = stopping.build_table(range(11), (), {}, num_tokens=12)
    ends = jnp.array([1, 0, 1], jnp.int32)
    prompts = dataclasses.replace(make_prompts(TEXTS), ends=ends)
    found = continue_(prompts, every, sampling=GREEDY)
    assert found.num_new.tolist() == [0, 1, 0]
    assert found.step == 1
