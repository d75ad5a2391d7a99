"""Optimizers and learning-rate schedules, from Optax."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from launch.optimizers.factored import scale_by_factored_rms
from launch.optimizers.orthogonal import is_for_muon, match_adam_rms, muon_dims
from launch.optimizers.parts import per_layer, split
from launch.optimizers.stored import stored_in
from launch.run_config import OptimConfig

Decay = Callable[[jax.Array, OptimConfig], jax.Array]


def _cosine(progress: jax.Array, optim: OptimConfig) -> jax.Array:
    final = optim.final_fraction
    return final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


def _polynomial(progress: jax.Array, optim: OptimConfig) -> jax.Array:
    final = optim.final_fraction
    return final + (1 - final) * (1 - progress) ** optim.power


def _exponential(progress: jax.Array, optim: OptimConfig) -> jax.Array:
    return optim.final_fraction**progress


def _steps(progress: jax.Array, optim: OptimConfig) -> jax.Array:
    milestones = jnp.asarray(optim.milestones, jnp.float32).reshape(-1)
    passed = (progress[..., None] >= milestones).sum(-1)
    return optim.decay_factor**passed


# Name -> share of the learning rate left at ``progress`` in [0, 1] of the training.
DECAYS: Mapping[str, Decay] = {
    "constant": lambda progress, optim: jnp.ones_like(progress),
    "cosine": _cosine,
    "polynomial": _polynomial,  # power 1 is the linear decay of BERT
    "exponential": _exponential,
    "steps": _steps,
}


def learning_rate_schedule(optim: OptimConfig, *, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step.

    ``decay(t)`` falls over ``num_steps``, counted from step 0 as in LiBai. In the first
    ``warmup_steps`` = W the rate grows linearly from 0 to what it is at W, so that
    step ``t`` has ``decay(W) * t / W``; after that it is ``decay(t)``.

    Example:
        >>> optim = OptimConfig(learning_rate=1.0, warmup_steps=2, schedule="constant")
        >>> rate = learning_rate_schedule(optim, num_steps=10)
        >>> [float(rate(step)) for step in range(4)]
        [0.0, 0.5, 1.0, 1.0]
    """
    decay = DECAYS[optim.schedule]

    def rate(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warmup = float(max(optim.warmup_steps, 1))
        warm = jnp.where(step < optim.warmup_steps, step / warmup, 1.0)
        clock = jnp.maximum(step, optim.warmup_steps)
        progress = jnp.minimum(clock / num_steps, 1.0)
        return optim.learning_rate * warm * decay(progress, optim)

    return rate


def adamw(optim: OptimConfig) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (arXiv:1711.05101), before the learning rate."""
    return optax.chain(
        optax.scale_by_adam(*optim.betas, eps=optim.epsilon),
        optax.add_decayed_weights(optim.weight_decay, mask=is_decayed),
    )


def lamb(optim: OptimConfig) -> optax.GradientTransformation:
    """LAMB (arXiv:1904.00962), before the learning rate.

    The trust ratio is that of each layer's parameter, not of the stack of all layers.
    """
    return optax.chain(adamw(optim), per_layer(optax.scale_by_trust_ratio()))


def lion(optim: OptimConfig) -> optax.GradientTransformation:
    """Lion (arXiv:2302.06675), before the learning rate: one moment, updates of +-1."""
    return optax.chain(
        optax.scale_by_lion(*optim.betas),
        optax.add_decayed_weights(optim.weight_decay, mask=is_decayed),
    )


def adafactor(optim: OptimConfig) -> optax.GradientTransformation:
    """Adafactor (arXiv:1804.04235), before the learning rate; no first moment.

    The update of each layer's parameter is clipped to a root mean square of 1, then
    multiplied by that of the parameter, or by 1e-3 if that is more: the learning rate
    is relative.
    """
    return optax.chain(
        scale_by_factored_rms(),
        per_layer(optax.clip_by_block_rms(1.0)),
        per_layer(optax.scale_by_param_block_rms()),
        optax.add_decayed_weights(optim.weight_decay, mask=is_decayed),
    )


def muon(optim: OptimConfig) -> optax.GradientTransformation:
    """Muon on the kernels of the blocks, AdamW on the rest, before the learning rate.

    The momentum of a kernel is made a matrix whose singular values are about 1, and
    multiplied by ``0.2 * sqrt(max(rows, columns))``: its root mean square is then that
    of AdamW's updates, whose learning rate and decay fit (arXiv:2502.16982).
    """
    return optax.chain(
        split(
            is_for_muon,
            optax.chain(
                optax.contrib.scale_by_muon(
                    beta=optim.momentum, weight_dimension_numbers=muon_dims
                ),
                match_adam_rms(),
            ),
            optax.scale_by_adam(*optim.betas, eps=optim.epsilon),
        ),
        optax.add_decayed_weights(optim.weight_decay, mask=is_decayed),
    )


OPTIMIZERS: Mapping[str, Callable[[OptimConfig], optax.GradientTransformation]] = {
    "adamw": adamw,
    "lamb": lamb,
    "adafactor": adafactor,
    "lion": lion,
    "muon": muon,
}


def build(optim: OptimConfig, *, num_steps: int) -> optax.GradientTransformation:
    """Returns the whole update rule: global-norm clip, optimizer, learning rate.

    The norm is that of all gradients together (as in Megatron, not per parameter
    group). Under `jax.jit` its squares are summed where the shards lie, and only the
    sums are communicated.
    """
    clip = (
        optax.identity()
        if optim.grad_clip_norm is None
        else optax.clip_by_global_norm(optim.grad_clip_norm)
    )
    return optax.chain(
        clip,
        stored_in(optim.state_dtype, OPTIMIZERS[optim.name](optim)),
        optax.scale_by_learning_rate(
            learning_rate_schedule(optim, num_steps=num_steps)
        ),
    )


def is_decayed(params: Any) -> Any:
    """Returns a tree of booleans: False on biases and on the parameters of norms.

    A parameter belongs to a norm if a segment of its path ends in ``norm``.
    """

    def decide(path: tuple, _: jax.Array) -> bool:
        names = [str(key.key) for key in path]
        return names[-1] != "bias" and not any(n.endswith("norm") for n in names)

    return jax.tree.map_with_path(decide, params)
