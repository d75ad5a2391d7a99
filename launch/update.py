"""The second half of the training step: from gradients to new parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from launch.state import TrainState
from models.stacked import Params


def apply_gradients(
    state: TrainState,
    grads: Params,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the state after one update, and what to report of it.

    Args:
        state: Before the update.
        grads: Gradients of the mean loss over the whole batch.
        optimizer: The update rule.
        learning_rate: Rate by step, for the report.
    """
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    metrics = {
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": jnp.asarray(learning_rate(state.step)),
    }
    new = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
    return new, metrics
