"""Which implementation of attention a run has, and how it runs over ``tensor``.

XLA splits ``plain`` by heads on its own. The others are run for the heads of each
device alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models import weight_dropout
from models.attention import CORES, Core, attend_cudnn
from models.blocked_attention import attention_backward, attention_forward
from models.layers import BlockConfig
from models.masks import AttentionMask
from models.stacked import StackedModel
from models.weight_dropout import WeightDropout

BLOCKED_FROM = 256  # positions; on CPU the blocked one is the faster from there on
GPUS = ("gpu", "cuda")  # platforms; the latter of virtual ones
HEADS = P(None, None, "tensor")  # (B, L, H) and (B, L, H, K)


def choose(config: BlockConfig, *, platform: str, length: int) -> str:
    """Returns the name of the implementation that a run has.

    That of the config, unless it is ``"auto"``: then ``"cudnn"`` on GPUs for what it
    can do, ``"blocked"`` on CPUs for sequences that are long enough for it to be the
    fastest, and ``"plain"`` for the rest.

    Args:
        config: Of the model.
        platform: Of the devices, as JAX calls it.
        length: Positions of a sample.

    Example:
        >>> choose(BlockConfig(), platform="cpu", length=1024)
        'blocked'
    """
    if config.attention != "auto":
        return config.attention
    if platform == "cpu":
        return "blocked" if length >= BLOCKED_FROM else "plain"
    config = dataclasses.replace(config, attention="cudnn")
    if any(broken_rules(config, platform=platform, length=length)):
        return "plain"
    return "cudnn"


def broken_rules(
    config: BlockConfig, *, platform: str | None, length: int
) -> Iterator[str]:
    """Yields one sentence per broken rule of ``attention``.

    Args:
        config: Of the model.
        platform: Of the devices; None if it is not known.
        length: Positions of a sample.
    """
    if config.attention != "cudnn":
        return
    yield from config.broken_rules()
    if platform is not None and platform not in GPUS:
        yield (
            "attention='cudnn' runs on GPUs, but the devices of this run are of"
            f" platform {platform!r}. Use 'auto' or 'blocked'."
        )
    if length % 2:
        yield (
            f"attention='cudnn' works on an even number of positions, but there are"
            f" {length}. Change that, or use 'plain'."
        )


def with_core(model: StackedModel, name: str, mesh: Mesh) -> StackedModel:
    """Returns the model with this implementation in each of its blocks.

    Args:
        model: The model.
        name: From `choose`.
        mesh: Its devices, with an axis ``tensor`` that is left to XLA.
    """
    core = make_core(name, mesh)

    def adapt_block(block: Any) -> None:
        model.adapt_block(block)
        block.attention.core = core

    return dataclasses.replace(model, adapt_block=adapt_block)


def make_core(name: str, mesh: Mesh) -> Core:
    """Returns an implementation, which may be given heads split over ``tensor``."""
    if name == "plain" or (name == "blocked" and mesh.shape["tensor"] == 1):
        return CORES[name]
    rules = BLOCKED if name == "blocked" else CUDNN
    per_head = PerHead(mesh, *rules)

    def core(
        q_BLHK: jax.Array,
        k_BTHK: jax.Array,
        v_BTHK: jax.Array,
        mask: AttentionMask | None,
        *,
        rate: float = 0.0,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        sizes = dict(num_queries=q_BLHK.shape[1], num_keys=k_BTHK.shape[1])
        drops = weight_dropout.make(rate, keys_B, **sizes)
        return _attend(per_head, q_BLHK, k_BTHK, v_BTHK, mask, drops)

    return core


@dataclasses.dataclass(frozen=True, slots=True)
class PerHead:
    """An implementation that is run for the heads of each device along ``tensor``.

    A pass over the heads in both directions is a map over ``tensor`` of its own:
    differentiated through, such a map has residuals of wrong shapes in JAX 0.10.

    Attributes:
        mesh: The devices.
        forward: ``forward(q, k, v, mask, dropout)`` returns the means of the values,
            and what the backward pass needs besides the arguments: a tree of arrays
            with heads as dim 2.
        backward: ``backward(q, k, v, means, others, gradient, mask, dropout)`` returns
            the gradients of queries, keys and values.
    """

    mesh: Mesh
    forward: Callable[..., tuple[jax.Array, Any]]
    backward: Callable[..., tuple[jax.Array, ...]]

    def run(self, function: Callable, of_heads: tuple, *rules: Any) -> Any:
        """Returns what the function does, for the heads of each device.

        Args:
            function: One of the two.
            of_heads: Its arguments with heads as dim 2.
            rules: The others: mask and dropout.
        """
        inside = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            lambda of_heads, mask, dropout: function(
                *of_heads, mask, _for_own_heads(dropout, of_heads[0])
            ),
            mesh=self.mesh if inside.empty else inside,
            axis_names={"tensor"},
            in_specs=(HEADS, P(), P()),
            out_specs=HEADS,
        )(of_heads, *rules)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(per_head: PerHead, *arguments: Any) -> jax.Array:
    return _forward(per_head, *arguments)[0]


def _forward(per_head: PerHead, *arguments: Any) -> tuple[jax.Array, tuple]:
    q_BLHK, k_BTHK, v_BTHK, *rules = arguments
    means, others = per_head.run(per_head.forward, (q_BLHK, k_BTHK, v_BTHK), *rules)
    means = checkpoint_name(means, "attention_values")
    others = jax.tree.map(lambda x: checkpoint_name(x, "attention_lse"), others)
    return means, (arguments, means, others)


def _backward(per_head: PerHead, residuals: tuple, gradient: jax.Array) -> tuple:
    (q_BLHK, k_BTHK, v_BTHK, *rules), means, others = residuals
    of_heads = q_BLHK, k_BTHK, v_BTHK, means, others, gradient
    return *per_head.run(per_head.backward, of_heads, *rules), None, None


_attend.defvjp(_forward, _backward)


def _blocked_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    means: jax.Array,
    lse: jax.Array,
    gradient: jax.Array,
    mask: AttentionMask | None,
    dropout: WeightDropout | None,
) -> tuple[jax.Array, ...]:
    return attention_backward(
        q, k, v, mask, dropout, out_BLHK=means, lse_BLH=lse, grad_BLHK=gradient
    )


def _cudnn_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask | None, _: None
) -> tuple[jax.Array, None]:
    return attend_cudnn(q, k, v, mask), None


def _cudnn_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    means: jax.Array,
    others: None,
    gradient: jax.Array,
    mask: AttentionMask | None,
    _: None,
) -> tuple[jax.Array, ...]:
    """Goes forward again: what its backward pass needs has no public form."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_cudnn(q, k, v, mask)

    return jax.vjp(attend, q, k, v)[1](gradient)


BLOCKED = attention_forward, _blocked_backward
CUDNN = _cudnn_forward, _cudnn_backward


def _for_own_heads(dropout: WeightDropout | None, q: jax.Array) -> WeightDropout | None:
    """Returns the dropout of the heads of this device."""
    if dropout is None:
        return None
    first_head = jax.lax.axis_index("tensor") * q.shape[2]
    return dataclasses.replace(dropout, first_head=first_head)
