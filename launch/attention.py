"""Which implementation of attention a run has, and how it runs over ``tensor``.

XLA splits ``plain`` by heads on its own. The others are run for the heads of each
device alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from launch.partial_attention import IMPLEMENTATIONS, PartialAttention
from models import weight_dropout
from models.attention import CORES, Attention, Core
from models.layers import BlockConfig
from models.masks import AttentionMask
from models.stacked import StackedModel
from models.weight_dropout import WeightDropout

BLOCKED_FROM = 256  # positions; on CPU the blocked one is the faster from there on
GPUS = ("gpu", "cuda")  # platforms; the latter of virtual ones
HEADS = P(None, None, "tensor")  # (B, L, H) and (B, L, H, K)


def choose(
    config: BlockConfig, *, platform: str, length: int, has_cudnn: bool = True
) -> str:
    """Returns the name of the implementation that a run has.

    That of the config, unless it is ``"auto"``: then ``"cudnn"`` on GPUs for what it
    can do, ``"blocked"`` on CPUs for sequences that are long enough for it to be the
    fastest, and ``"plain"`` for the rest.

    Args:
        config: Of the model.
        platform: Of the devices, as JAX calls it.
        length: Positions of a sample.
        has_cudnn: Whether cuDNN is installed, which GPUs that are not there can do
            without.

    Example:
        >>> choose(BlockConfig(), platform="cpu", length=1024)
        'blocked'
    """
    if config.attention != "auto":
        return config.attention
    if platform == "cpu":
        return "blocked" if length >= BLOCKED_FROM else "plain"
    config = dataclasses.replace(config, attention="cudnn")
    is_possible = not any(broken_rules(config, platform=platform, length=length))
    return "cudnn" if has_cudnn and is_possible else "plain"


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


def with_core(model: StackedModel, mesh: Mesh, *, has_cudnn: bool) -> StackedModel:
    """Returns the model with the implementation of a run in all its attention.

    Args:
        model: The model.
        mesh: Its devices, with an axis ``tensor`` that is left to XLA.
        has_cudnn: See `choose`.
    """
    platform = mesh.devices.flat[0].platform
    made = {name: make_core(name, mesh) for name in CORES}

    def core_of(config: BlockConfig) -> Core:
        def core(q_BLHK: jax.Array, *others: Any, **dropping: Any) -> jax.Array:
            length = q_BLHK.shape[1]
            name = choose(config, platform=platform, length=length, has_cudnn=has_cudnn)
            return made[name](q_BLHK, *others, **dropping)

        return core

    def adapt_block(block: Any) -> None:
        model.adapt_block(block)
        for _, module in list(nnx.iter_modules(block)):
            if isinstance(module, Attention):
                module.core = core_of(module.config)

    return dataclasses.replace(model, adapt_block=adapt_block)


def make_core(name: str, mesh: Mesh) -> Core:
    """Returns an implementation, which may be given heads split over ``tensor``."""
    if name == "plain" or (name == "blocked" and mesh.shape["tensor"] == 1):
        return CORES[name]
    per_head = PerHead(mesh, IMPLEMENTATIONS[name])

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
        arguments = q_BLHK, k_BTHK, v_BTHK, mask or AttentionMask(), drops
        return _attend(per_head, *arguments)

    return core


@dataclasses.dataclass(frozen=True, slots=True)
class PerHead:
    """An implementation that is run for the heads of each device along ``tensor``.

    Each direction is a map over the devices of its own: differentiated through, such a
    map has residuals of wrong shapes in JAX 0.10.

    Attributes:
        mesh: The devices.
        attention: What is run, for all keys at once.
    """

    mesh: Mesh
    attention: PartialAttention

    def run(self, function: Callable, of_heads: Any, *rules: Any) -> Any:
        """Returns what the function does, for the heads of each device.

        Args:
            function: Of the other arguments; all its results have heads as dim 2.
            of_heads: Trees of arrays with heads as dim 2.
            rules: Mask and dropout.
        """
        inside = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if inside.empty else inside

        def run(of_heads: Any, mask: Any, dropout: WeightDropout | None) -> Any:
            num_heads = jax.tree.leaves(of_heads)[0].shape[2]
            return function(of_heads, mask, _for_own_heads(dropout, num_heads))

        return jax.shard_map(
            run,
            mesh=mesh,
            # Axes of one device as well: cuDNN leaves XLA nothing to split.
            axis_names=set(mesh.axis_names) - set(inside.manual_axes),
            in_specs=(HEADS, P(), P()),
            out_specs=HEADS,
        )(of_heads, *rules)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(per_head: PerHead, *arguments: Any) -> jax.Array:
    return _forward(per_head, *arguments)[0]


def _forward(per_head: PerHead, *arguments: Any) -> tuple[jax.Array, tuple]:
    q_BLHK, k_BTHK, v_BTHK, *rules = arguments

    def run(qkv: tuple, *rules: Any) -> tuple[jax.Array, jax.Array]:
        return per_head.attention.forward(*qkv, *rules)

    means_BLHK, lse_BLH = per_head.run(run, (q_BLHK, k_BTHK, v_BTHK), *rules)
    means_BLHK = checkpoint_name(means_BLHK, "attention_values")
    lse_BLH = checkpoint_name(lse_BLH, "attention_lse")
    return means_BLHK, (arguments, means_BLHK, lse_BLH)


def _backward(per_head: PerHead, residuals: tuple, grad_BLHK: jax.Array) -> tuple:
    (q_BLHK, k_BTHK, v_BTHK, *rules), means_BLHK, lse_BLH = residuals
    results = dict(out_BLHK=means_BLHK, lse_BLH=lse_BLH, grad_BLHK=grad_BLHK)

    def run(of_heads: tuple, *rules: Any) -> tuple[jax.Array, ...]:
        qkv, results = of_heads
        return per_head.attention.backward(*qkv, *rules, **results)

    of_heads = (q_BLHK, k_BTHK, v_BTHK), results
    return *per_head.run(run, of_heads, *rules), None, None


_attend.defvjp(_forward, _backward)


def _for_own_heads(
    dropout: WeightDropout | None, num_heads: int
) -> WeightDropout | None:
    """Returns the dropout of the heads of this device."""
    if dropout is None:
        return None
    first_head = jax.lax.axis_index("tensor") * num_heads
    return dataclasses.replace(dropout, first_head=first_head)
