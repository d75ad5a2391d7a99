"""Continues texts token by token, in one loop that can be compiled.

The loop ends as soon as every text has ended. It comes in two functions, so that a
caller can say between them how the state lies on devices.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.decoding import AbstractDecoder, Memory
from models.layers import fold_keys
from models.sampling import SamplingConfig, choose
from models.stacked import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Texts to continue.

    Attributes:
        tokens: int32 ``(B, L)``; what is past the end of a text has no meaning.
        lengths: int32 ``(B,)``, tokens of each, at least 1.
        ends: int32 ``(B,)``, the state of each in the table of `models.stopping`: 0,
            or the last one for a row that is no text.
        keys: ``(B,)``, a key for each; None if nothing is drawn.
    """

    tokens: jax.Array
    lengths: jax.Array
    ends: jax.Array
    keys: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Texts under way.

    Attributes:
        step: int32 scalar, tokens that have been chosen.
        memory: Of the decoder, of all tokens but the last.
        tokens: int32 ``(B, N)``, what has been chosen; 0 from the end of a text on.
        num_new: int32 ``(B,)``, how many of these count, the one that ends the text
            included.
        ends: See `Prompts`.
        seen: Boolean ``(B, V)``, the tokens that a text has, prompt included; None if
            nobody asks.
    """

    step: jax.Array
    memory: Memory
    tokens: jax.Array
    num_new: jax.Array
    ends: jax.Array
    seen: jax.Array | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How texts are continued.

    Attributes:
        decoder: Scores next tokens.
        sampling: How one of them is chosen.
        max_new_tokens: Tokens that a text may get.
        gather: Applied to the scores, to have them where a token is drawn. Nothing by
            default.
    """

    decoder: AbstractDecoder
    sampling: SamplingConfig
    max_new_tokens: int
    gather: Callable[[jax.Array], jax.Array] = lambda logits_BV: logits_BV

    def start(self, params: Params, prompts: Prompts, table_SV: jax.Array) -> State:
        """Reads the prompts and chooses the first token of each.

        Args:
            params: Parameters, blocks stacked.
            prompts: What to continue.
            table_SV: When a text ends, from `models.stopping`.
        """
        num_rows, length = prompts.tokens.shape
        num_slots = length + self.max_new_tokens
        memory, logits_BV = self.decoder.prefill(
            params, prompts.tokens, prompts.lengths, num_slots
        )
        seen_BV = None
        if self.sampling.repetition_penalty != 1:
            seen_BV = seen_tokens(prompts, logits_BV.shape[1])
        state = State(
            step=jnp.int32(0),
            memory=memory,
            tokens=jnp.zeros((num_rows, self.max_new_tokens), jnp.int32),
            num_new=jnp.zeros_like(prompts.lengths),
            ends=prompts.ends,
            seen=seen_BV,
        )
        return self._append(state, prompts, table_SV, logits_BV)

    def finish(
        self, params: Params, prompts: Prompts, table_SV: jax.Array, state: State
    ) -> State:
        """Continues what `start` began with, until all texts have ended."""

        def is_under_way(state: State) -> jax.Array:
            is_open_B = state.ends != len(table_SV) - 1
            return (state.step < self.max_new_tokens) & is_open_B.any()

        def advance(state: State) -> State:
            last = state.step - 1
            memory, logits_BV = self.decoder.step(
                params,
                state.memory,
                jax.lax.dynamic_index_in_dim(state.tokens, last, 1, keepdims=False),
                prompts.lengths + last,
            )
            state = dataclasses.replace(state, memory=memory)
            return self._append(state, prompts, table_SV, logits_BV)

        return jax.lax.while_loop(is_under_way, advance, state)

    def _append(
        self,
        state: State,
        prompts: Prompts,
        table_SV: jax.Array,
        logits_BV: jax.Array,
    ) -> State:
        """Chooses a token for each text that has not ended."""
        keys_B = fold_keys(prompts.keys, state.step)
        chosen_B = choose(
            self.gather(logits_BV), self.sampling, keys_B=keys_B, seen_BV=state.seen
        )
        is_open_B = state.ends != len(table_SV) - 1
        chosen_B = jnp.where(is_open_B, chosen_B, 0)
        seen_BV = state.seen
        if seen_BV is not None:
            seen_BV = seen_BV.at[jnp.arange(len(chosen_B)), chosen_B].set(True)
        return State(
            step=state.step + 1,
            memory=state.memory,
            tokens=jax.lax.dynamic_update_index_in_dim(
                state.tokens, chosen_B, state.step, 1
            ),
            num_new=state.num_new + is_open_B,
            ends=table_SV[state.ends, chosen_B],
            seen=seen_BV,
        )


def seen_tokens(prompts: Prompts, num_tokens: int) -> jax.Array:
    """Returns whether each prompt has each token, boolean ``(B, V)``."""
    num_rows, length = prompts.tokens.shape
    is_text_BL = jnp.arange(length)[None, :] < prompts.lengths[:, None]
    rows_B1 = jnp.arange(num_rows)[:, None]
    none_BV = jnp.zeros((num_rows, num_tokens), bool)
    return none_BV.at[rows_B1, prompts.tokens].max(is_text_BL)
