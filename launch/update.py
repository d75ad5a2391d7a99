"""The second half of the training step: from gradients to new parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from launch.loss_scale import LossScaling
from launch.state import TrainState
from models.stacked import Params

Metrics = dict[str, jax.Array]


def apply_gradients(
    state: TrainState,
    grads: Params,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    loss_scaling: LossScaling | None = None,
) -> tuple[TrainState, Metrics]:
    """Returns the state after one update, and what to report of it.

    Args:
        state: Before the update.
        grads: Gradients of the mean loss over the whole batch, times the scale if the
            loss is scaled.
        optimizer: The update rule.
        learning_rate: Rate by the number of updates, for the report.
        loss_scaling: How the scale changes; None if there is none. If the gradients
            are not finite, parameters and optimizer state stay as they are.
    """
    if loss_scaling is None:
        return _update(state, grads, optimizer, learning_rate)
    scale = state.loss_scale
    assert scale is not None, "create_state and build_train_step have the same scaling"
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale.scale, grads)
    new, metrics = _update(state, grads, optimizer, learning_rate)
    # A sum of squares: not finite if any of them is not.
    is_finite = jnp.isfinite(metrics["grad_norm"])

    def choose(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(is_finite, n, o), new, old)

    after = loss_scaling.update(scale, is_finite)
    num_updates = state.step - scale.num_skipped
    metrics |= {
        "learning_rate": jnp.asarray(learning_rate(num_updates)),
        "loss_scale": scale.scale,
        "skipped_steps": after.num_skipped,
        "is_skipped": loss_scaling.is_skipped(scale, is_finite),
    }
    new = TrainState(
        step=new.step,
        params=choose(new.params, state.params),
        opt_state=choose(new.opt_state, state.opt_state),
        loss_scale=after,
    )
    return new, metrics


def _update(
    state: TrainState,
    grads: Params,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
) -> tuple[TrainState, Metrics]:
    """Returns the state after one update, whatever the gradients are."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = _apply(state.params, updates)
    metrics = {
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": jnp.asarray(learning_rate(state.step)),
    }
    new = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
    return new, metrics


def _apply(params: Any, updates: Any) -> Any:
    """Returns the parameters, updated where there is an update."""
    if not isinstance(params, dict):
        return optax.apply_updates(params, updates)
    return {
        name: _apply(value, updates[name]) if name in updates else value
        for name, value in params.items()
    }
