"""How the next token is chosen from the scores of all tokens.

Pure functions of ``(B, V)`` logits, one row per text. A token that may not be chosen
has ``-inf``. They are applied in the order of the table `PROCESSORS`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from models.rules import at_least


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How to choose; the defaults take the best token.

    Attributes:
        temperature: Divides the logits before drawing; 0 takes the best token.
        top_k: Draws from this many best tokens, and those equal to the last of them.
            None for all.
        top_p: Draws from the fewest best tokens whose probabilities sum to at least
            this. 1 for all.
        repetition_penalty: Of each token that the text has already, prompt included, a
            positive logit is divided and a negative one multiplied by this
            (arXiv:1909.05858). 1 for none.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from at_least(self, temperature=0, top_k=1)
        if not 0 < self.top_p <= 1:
            yield (
                f"top_p={self.top_p} must be above 0 and at most 1. Use 1 to draw from"
                " all tokens."
            )
        if not self.repetition_penalty > 0:
            yield (
                f"repetition_penalty={self.repetition_penalty} must be above 0. Use 1"
                " for none, and more to repeat less."
            )
        if self.temperature == 0:
            given = {"top_k": (self.top_k, None), "top_p": (self.top_p, 1.0)}
            for name, (value, unset) in given.items():
                if value != unset:
                    yield (
                        f"{name}={value} has no meaning at temperature=0, which takes"
                        " the best token. Set a temperature, such as 1.0."
                    )


def penalize_repetition(
    logits_BV: jax.Array, penalty: float, seen_BV: jax.Array
) -> jax.Array:
    """Lowers the tokens that a text has already.

    Example:
        >>> seen = jnp.array([[True, True, False]])
        >>> penalize_repetition(jnp.array([[2.0, -1.0, 1.0]]), 2.0, seen).tolist()
        [[1.0, -2.0, 1.0]]
    """
    lower_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return jnp.where(seen_BV, lower_BV, logits_BV)


def keep_top_k(logits_BV: jax.Array, k: int) -> jax.Array:
    """Leaves the ``k`` best tokens, and those equal to the last of them.

    Example:
        >>> keep_top_k(jnp.array([[3.0, 1.0, 2.0]]), 2).tolist()
        [[3.0, -inf, 2.0]]
    """
    lowest_B = jax.lax.top_k(logits_BV, k)[0][:, -1:]
    return jnp.where(logits_BV >= lowest_B, logits_BV, -jnp.inf)


def keep_top_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """Leaves the fewest best tokens of probability ``p`` (arXiv:1904.09751).

    The best one always stays, and so do tokens equal to the last that stays.

    Example:
        >>> kept = keep_top_p(jnp.log(jnp.array([[0.2, 0.5, 0.3]])), 0.6)
        >>> jax.numpy.isfinite(kept).tolist()
        [[False, True, True]]
    """
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    probs_BV = jax.nn.softmax(sorted_BV)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    lowest_B = jnp.where(before_BV < p, sorted_BV, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits_BV >= lowest_B, logits_BV, -jnp.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A change of the logits.

    Attributes:
        unused: The value with which it changes nothing.
        apply: ``apply(logits_BV, value, seen_BV)``.
    """

    unused: Any
    apply: Callable[[jax.Array, Any, Any], jax.Array]


# By the field of `SamplingConfig` that holds the value.
PROCESSORS = {
    "repetition_penalty": Processor(unused=1.0, apply=penalize_repetition),
    "temperature": Processor(unused=0.0, apply=lambda x, value, seen: x / value),
    "top_k": Processor(unused=None, apply=lambda x, value, seen: keep_top_k(x, value)),
    "top_p": Processor(unused=1.0, apply=lambda x, value, seen: keep_top_p(x, value)),
}


def process(
    logits_BV: jax.Array, config: SamplingConfig, seen_BV: jax.Array | None
) -> jax.Array:
    """Returns the logits from which to draw, by all processors in use.

    Args:
        logits_BV: Scores of the model, float32.
        config: Says which.
        seen_BV: Whether a text has a token already, boolean. May be None without a
            repetition penalty.
    """
    values = dataclasses.asdict(config)
    for name, processor in PROCESSORS.items():
        value = values[name]
        if value != processor.unused:
            logits_BV = processor.apply(logits_BV, value, seen_BV)
    return logits_BV


def choose(
    logits_BV: jax.Array,
    config: SamplingConfig,
    *,
    keys_B: jax.Array | None,
    seen_BV: jax.Array | None,
) -> jax.Array:
    """Returns the next token of each text, int32 ``(B,)``.

    Args:
        logits_BV: See `process`.
        config: How to choose.
        keys_B: A key per text, which alone decides what is drawn of its row. May be
            None if nothing is drawn.
        seen_BV: See `process`.
    """
    logits_BV = process(logits_BV, config, seen_BV)
    if not config.is_random:
        return logits_BV.argmax(-1).astype(jnp.int32)
    assert keys_B is not None
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
