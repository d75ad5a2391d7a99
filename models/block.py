"""The transformer block: attention and MLP."""

import math
from collections.abc import Callable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.attention import Attention
from models.layers import (
    ACTIVATIONS,
    BlockConfig,
    depth_rate,
    dropout,
    fold_keys,
    layer_norm,
    linear,
    stochastic_depth,
)
from models.masks import AttentionMask


class Mlp(nnx.Module):
    """Position-wise feed-forward network (arXiv:1706.03762, section 3.3)."""

    def __init__(self, config: BlockConfig, *, out_scale: float, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[config.activation]
        dim, hidden = config.model_dim, config.mlp_dim
        self.up = linear(config, hidden, rngs=rngs)
        self.down = linear(config, dim, in_dims=hidden, scale=out_scale, rngs=rngs)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Maps each position on its own; the shape stays ``(B, L, D)``."""
        h_BLF = checkpoint_name(self.up(x_BLD), "mlp_up")
        return self.down(checkpoint_name(self.activation(h_BLF), "mlp_activation"))


class Block(nnx.Module):
    """One transformer layer: attention and MLP, each with residual and norm."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.config, self.drop = config, dropout
        is_pre = config.norm_position == "pre"
        depth = 2 * config.num_layers if is_pre else 1
        out_scale = config.init_scale / math.sqrt(depth)
        self.attention = Attention(config, out_scale=out_scale, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs=rngs)
        self.mlp = Mlp(config, out_scale=out_scale, rngs=rngs)
        self.mlp_norm = layer_norm(config, rngs=rngs)

    def __call__(
        self,
        x_BLD: jax.Array,
        mask: AttentionMask | None,
        keys_B: jax.Array | None,
        layer: int | jax.Array,
    ) -> jax.Array:
        """Applies the layer; the shape stays ``(B, L, D)``.

        Args:
            x_BLD: Input.
            mask: See `Attention`.
            keys_B: One key per sample; None switches all dropping off.
            layer: Index of this block in the stack.
        """

        def attend(h_BLD: jax.Array) -> jax.Array:
            return self.attention(h_BLD, mask, fold_keys(keys_B, 0))

        return self.run(x_BLD, attend, keys_B, layer)

    def run(
        self,
        x_BLD: jax.Array,
        attend: Callable[[jax.Array], jax.Array],
        keys_B: jax.Array | None,
        layer: int | jax.Array,
    ) -> jax.Array:
        """Applies the layer with another way to mix positions than its own.

        Args:
            x_BLD: Input.
            attend: In place of the attention: ``(B, L, D)`` to ``(B, L, D)``.
            keys_B: See `__call__`.
            layer: See `__call__`.
        """

        def mix(h_BLD: jax.Array) -> jax.Array:
            y_BLD = checkpoint_name(attend(h_BLD), "attention_out")
            # It may compute in float32 by itself; the residual stream does not.
            y_BLD = y_BLD.astype(h_BLD.dtype)
            return self._drop(y_BLD, fold_keys(keys_B, 1), layer)

        def transform(h_BLD: jax.Array) -> jax.Array:
            y_BLD = checkpoint_name(self.mlp(h_BLD), "mlp_down").astype(h_BLD.dtype)
            return self._drop(y_BLD, fold_keys(keys_B, 2), layer)

        if self.config.norm_position == "pre":
            x_BLD += mix(self._normalize("attention_norm", x_BLD))
            return x_BLD + transform(self._normalize("mlp_norm", x_BLD))
        x_BLD = self._normalize("attention_norm", x_BLD + mix(x_BLD))
        return self._normalize("mlp_norm", x_BLD + transform(x_BLD))

    def _normalize(self, name: str, x_BLD: jax.Array) -> jax.Array:
        norm = {"attention_norm": self.attention_norm, "mlp_norm": self.mlp_norm}[name]
        return checkpoint_name(norm(x_BLD).astype(x_BLD.dtype), name)

    def _drop(
        self, branch: jax.Array, keys_B: jax.Array | None, layer: int | jax.Array
    ) -> jax.Array:
        share, name = self.config.dropout_rate, "dropout_mask"
        branch = self.drop(branch, share, fold_keys(keys_B, 0), name=name)
        if self.config.stochastic_depth_rate == 0:
            return branch
        # Equal blocks run as one program: only at run time does one know its depth.
        rate = depth_rate(self.config, layer)
        return stochastic_depth(branch, rate, fold_keys(keys_B, 1))


def run_blocks(
    blocks: nnx.List,
    x_BLD: jax.Array,
    mask: AttentionMask | None,
    keys_B: jax.Array | None,
) -> jax.Array:
    """Applies blocks one after the other, on one device; see `Block`."""
    for layer, block in enumerate(blocks):
        x_BLD = block(x_BLD, mask, fold_keys(keys_B, 1 + layer), layer)
    return x_BLD
