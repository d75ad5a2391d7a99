"""Loss scaling: small gradients in float16 (arXiv:1710.03740, section 3.2).

float16 has nothing below 6e-8, and gradients are often smaller. The loss is multiplied
by a scale before the backward pass, the gradients are divided by it after it. If some
gradient is not finite the scale was too large: the step is skipped, nothing of the
weights or of the optimizer changes, and the scale is lowered.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The part of the train state that scaling needs; three scalars.

    Attributes:
        scale: float32, of the next step.
        num_good_steps: int32, since the scale changed or a step was skipped.
        num_skipped: int32, of the whole run.
    """

    scale: Any
    num_good_steps: Any
    num_skipped: Any


def abstract(sharding: Any) -> LossScale:
    """Returns shapes and dtypes of the state, with one sharding for all."""
    shapes = jax.eval_shape(LossScaling(initial=1.0).init)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )


def filled(value: Any) -> LossScale:
    """Returns the form of the state with one value in all places."""
    return LossScale(scale=value, num_good_steps=value, num_skipped=value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """How the scale changes.

    Attributes:
        initial: Scale of the first step.
        growth: Factor after ``interval`` steps without overflow; 1 for none.
        interval: Steps until the scale grows.
        backoff: Factor after an overflow.
        minimum: The scale never falls below. An overflow at this scale is not to be
            mended by scaling, and ends the run.
    """

    initial: float
    growth: float = 2.0
    interval: int = 2000
    backoff: float = 0.5
    minimum: float = 1.0

    @classmethod
    def static(cls, scale: float) -> "LossScaling":
        """Returns the rule of a scale that never changes."""
        return cls(initial=scale, growth=1.0, minimum=scale)

    def init(self) -> LossScale:
        """Returns the state before the first step."""
        return LossScale(
            scale=jnp.float32(self.initial),
            num_good_steps=jnp.int32(0),
            num_skipped=jnp.int32(0),
        )

    def update(self, state: LossScale, is_finite: jax.Array) -> LossScale:
        """Returns the state after a step.

        Args:
            state: Before the step.
            is_finite: Whether all gradients of the step are, boolean scalar.

        Example:
            >>> scaling = LossScaling(initial=8.0, interval=2)
            >>> state = scaling.init()
            >>> for is_finite in (True, True, False, False):
            ...     state = scaling.update(state, jnp.array(is_finite))
            ...     print(float(state.scale), int(state.num_good_steps))
            8.0 1
            16.0 0
            8.0 0
            4.0 0
        """
        num_good = state.num_good_steps + 1
        is_due = num_good >= self.interval
        grown = jnp.where(is_due, state.scale * self.growth, state.scale)
        grown = jnp.where(jnp.isfinite(grown), grown, state.scale)
        lowered = jnp.maximum(state.scale * self.backoff, self.minimum)
        return LossScale(
            scale=jnp.where(is_finite, grown, lowered),
            num_good_steps=jnp.where(is_finite & ~is_due, num_good, 0),
            num_skipped=state.num_skipped + ~is_finite,
        )

    def resume(self, saved: LossScale | None) -> LossScale:
        """Returns the state to go on with.

        Args:
            saved: From a checkpoint; None if it has none. A static scale is that of
                this rule, whatever is saved.
        """
        if saved is None:
            return self.init()
        most = self.initial if self.growth == 1 else None
        scale = jnp.clip(saved.scale, self.minimum, most)
        return dataclasses.replace(saved, scale=scale)

    def is_skipped(self, state: LossScale, is_finite: jax.Array) -> jax.Array:
        """Returns whether the step overflowed at a scale that can still be lowered."""
        return ~is_finite & (state.scale > self.minimum)
