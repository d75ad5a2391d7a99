"""Looks for the most probable continuations of texts (beam search).

Of each text the ``W`` best unfinished continuations are kept, the *beams*, and the
``W`` best finished ones. At each step a beam may end if its end is among the ``W`` best
of all continuations by one token. The search ends once no beam can still become better
than the worst of the finished ones.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.decoding import AbstractDecoder, Memory
from models.generation import Prompts, seen_tokens
from models.sampling import SamplingConfig, process
from models.stacked import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The best continuations that have ended, the best one first.

    Attributes:
        tokens: int32 ``(B, W, N)``; 0 past the end.
        num_new: int32 ``(B, W)``, tokens that count, the one that ends included.
        scores: float32 ``(B, W)``, the sum of the log-probabilities divided by
            ``num_new ** length_penalty``; ``-inf`` where there is none.
    """

    tokens: jax.Array
    num_new: jax.Array
    scores: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Beams under way.

    Attributes:
        step: int32 scalar, tokens of each beam.
        memory: Of the decoder, a row per beam, of all tokens but the last.
        tokens: int32 ``(B, W, N)``.
        totals: float32 ``(B, W)``, sums of log-probabilities, the best one first;
            ``-inf`` where there is no beam.
        ends: int32 ``(B, W)``, states in the table of `models.stopping`.
        seen: See `models.generation.State`, a row per beam.
        finished: What has ended.
    """

    step: jax.Array
    memory: Memory
    tokens: jax.Array
    totals: jax.Array
    ends: jax.Array
    seen: jax.Array | None
    finished: Finished


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """How to search.

    Attributes:
        decoder: Scores next tokens.
        num_beams: ``W``.
        max_new_tokens: Tokens that a text may get; a beam that has so many has ended.
        length_penalty: Exponent of the length by which the sum of log-probabilities is
            divided: 0 compares the sums, more favors long texts.
        repetition_penalty: See `SamplingConfig`.
        gather: Applied to the scores, to have them where they are compared. Nothing by
            default.
    """

    decoder: AbstractDecoder
    num_beams: int
    max_new_tokens: int
    length_penalty: float = 1.0
    repetition_penalty: float = 1.0
    gather: Callable[[jax.Array], jax.Array] = lambda logits_RV: logits_RV

    def start(self, params: Params, prompts: Prompts, table_SV: jax.Array) -> State:
        """Reads the prompts and begins the beams; see `Generation.start`."""
        num_rows, length = prompts.tokens.shape
        num_slots = length + self.max_new_tokens
        memory, logits_BV = self.decoder.prefill(
            params, prompts.tokens, prompts.lengths, num_slots
        )
        shape = (num_rows, self.num_beams)
        rows_R = jnp.repeat(jnp.arange(num_rows), self.num_beams)
        seen_RV = None
        if self.repetition_penalty != 1:
            seen_RV = seen_tokens(prompts, logits_BV.shape[1])[rows_R]
        # All beams are the same at first: only one of them counts, or none.
        is_first_BW = jnp.arange(self.num_beams)[None, :] == 0
        is_text_B1 = (prompts.ends != len(table_SV) - 1)[:, None]
        tokens_BWN = jnp.zeros((*shape, self.max_new_tokens), jnp.int32)
        state = State(
            step=jnp.int32(0),
            memory=self.decoder.gather(memory, rows_R),
            tokens=tokens_BWN,
            totals=jnp.where(is_first_BW & is_text_B1, 0.0, -jnp.inf),
            ends=jnp.zeros(shape, jnp.int32),
            seen=seen_RV,
            finished=Finished(
                tokens=tokens_BWN,
                num_new=jnp.zeros(shape, jnp.int32),
                scores=jnp.full(shape, -jnp.inf),
            ),
        )
        return self._expand(state, table_SV, logits_BV[rows_R])

    def finish(
        self, params: Params, prompts: Prompts, table_SV: jax.Array, state: State
    ) -> Finished:
        """Goes on with what `start` began, until no beam can become the best."""

        def is_under_way(state: State) -> jax.Array:
            return (state.step < self.max_new_tokens) & self._is_open(state).any()

        def advance(state: State) -> State:
            last = state.step - 1
            tokens_BW = jax.lax.dynamic_index_in_dim(
                state.tokens, last, 2, keepdims=False
            )
            memory, logits_RV = self.decoder.step(
                params,
                state.memory,
                tokens_BW.reshape(-1),
                jnp.repeat(prompts.lengths, self.num_beams) + last,
            )
            state = dataclasses.replace(state, memory=memory)
            return self._expand(state, table_SV, logits_RV)

        return jax.lax.while_loop(is_under_way, advance, state).finished

    def _is_open(self, state: State) -> jax.Array:
        """Returns for which texts a beam may still become better than the finished."""
        # Tokens never add to the sum, so that the longest text has the best score.
        best_B = self._score(state.totals[:, 0], self.max_new_tokens)
        return best_B > state.finished.scores[:, -1]

    def _score(self, totals: jax.Array, num_new: int | jax.Array) -> jax.Array:
        return totals / jnp.asarray(num_new, jnp.float32) ** self.length_penalty

    def _expand(self, state: State, table_SV: jax.Array, logits_RV: jax.Array) -> State:
        """Continues each beam with each token; keeps the best that end and go on."""
        sampling = SamplingConfig(repetition_penalty=self.repetition_penalty)
        logits_RV = process(self.gather(logits_RV), sampling, state.seen)
        # Padding of the vocabulary has the lowest float: it takes no probability.
        is_token_RV = logits_RV > jnp.finfo(jnp.float32).min
        log_probs_RV = jnp.where(is_token_RV, jax.nn.log_softmax(logits_RV), -jnp.inf)
        num_rows, num_beams = state.totals.shape
        totals_BWV = state.totals[..., None] + log_probs_RV.reshape(
            num_rows, num_beams, -1
        )
        num_new = state.step + 1
        is_end_BWV = table_SV[state.ends] == len(table_SV) - 1
        is_end_BWV |= num_new == self.max_new_tokens
        lowest_BW = jax.lax.top_k(totals_BWV.reshape(num_rows, -1), num_beams)[0]
        is_best_BWV = totals_BWV >= lowest_BW[:, -1:, None]

        ends_here_BWV = is_end_BWV & is_best_BWV
        ending = self._best(state, jnp.where(ends_here_BWV, totals_BWV, -jnp.inf))
        scores_BW = self._score(ending.totals, num_new)
        finished = self._add(state.finished, ending.tokens, num_new, scores_BW)
        going = self._best(state, jnp.where(is_end_BWV, -jnp.inf, totals_BWV))
        rows_R = (jnp.arange(num_rows)[:, None] * num_beams + going.parents).reshape(-1)
        seen_RV = state.seen
        if seen_RV is not None:
            seen_RV = seen_RV[rows_R]
            seen_RV = seen_RV.at[jnp.arange(len(rows_R)), going.last.reshape(-1)].set(
                True
            )
        ends_BW = jnp.take_along_axis(state.ends, going.parents, axis=1)
        return State(
            step=num_new,
            memory=self.decoder.gather(state.memory, rows_R),
            tokens=going.tokens,
            totals=going.totals,
            ends=table_SV[ends_BW, going.last],
            seen=seen_RV,
            finished=finished,
        )

    def _best(self, state: State, totals_BWV: jax.Array) -> "_Chosen":
        """Returns the best continuations of a text's beams by one token."""
        num_rows, num_beams, num_tokens = totals_BWV.shape
        flat = totals_BWV.reshape(num_rows, -1)
        totals_BW, index_BW = jax.lax.top_k(flat, num_beams)
        parents_BW, last_BW = index_BW // num_tokens, index_BW % num_tokens
        tokens_BWN = jnp.take_along_axis(state.tokens, parents_BW[..., None], axis=1)
        tokens_BWN = jax.lax.dynamic_update_index_in_dim(
            tokens_BWN, last_BW, state.step, 2
        )
        return _Chosen(
            totals=totals_BW, parents=parents_BW, last=last_BW, tokens=tokens_BWN
        )

    def _add(
        self,
        finished: Finished,
        tokens_BWN: jax.Array,
        num_new: jax.Array,
        scores_BW: jax.Array,
    ) -> Finished:
        """Returns the best of what has ended before and now."""
        both_BX = jnp.concatenate([finished.scores, scores_BW], axis=1)
        scores_BW, index_BW = jax.lax.top_k(both_BX, self.num_beams)
        tokens_BXN = jnp.concatenate([finished.tokens, tokens_BWN], axis=1)
        num_new_BW = jnp.broadcast_to(num_new, finished.num_new.shape)
        num_new_BX = jnp.concatenate([finished.num_new, num_new_BW], axis=1)
        return Finished(
            tokens=jnp.take_along_axis(tokens_BXN, index_BW[..., None], axis=1),
            num_new=jnp.take_along_axis(num_new_BX, index_BW, axis=1),
            scores=scores_BW,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """Continuations by one token, the best one first.

    Attributes:
        totals: float32 ``(B, W)``, sums of log-probabilities.
        parents: int32 ``(B, W)``, the beam that each continues.
        last: int32 ``(B, W)``, the token by which it does.
        tokens: int32 ``(B, W, N)``.
    """

    totals: jax.Array
    parents: jax.Array
    last: jax.Array
    tokens: jax.Array
