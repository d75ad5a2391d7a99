"""What the models share: vocabulary table, attention, MLP, norms, dropout.

Linear maps of attention keep heads as a dim of their own, so that a signature can
split heads without splitting a head.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.losses import cross_entropy
from models.rules import at_least, between, one_of

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Sizes of a transformer block.

    Attributes:
        num_layers: Blocks in the whole stack.
        num_heads: Attention heads; divides ``model_dim``.
        model_dim: Width of the residual stream.
        mlp_dim: Hidden width of the MLP.
        dropout_rate: Rate on the outputs of attention, MLP and embedding.
        attention_dropout_rate: Rate on the attention probabilities.
        stochastic_depth_rate: Share of samples that skip a half of the last block;
            the share grows linearly from 0 at the first block (arXiv:1603.09382).
        norm_position: ``"post"`` as in BERT (norm after the residual sum), or
            ``"pre"`` as in GPT-2 (norm on the input of each half, one at the end).
        norm_epsilon: Added to the variance.
        activation: ``"gelu"`` (by the error function) or ``"gelu_tanh"``.
        init_scale: Standard deviation of the initial weights. The maps that write
            into the residual stream of a ``"pre"`` model are divided by
            ``sqrt(2 * num_layers)``, as in GPT-2.
        dtype: Of the computation.
        param_dtype: Of the stored parameters.
    """

    num_layers: int = 2
    num_heads: int = 2
    model_dim: int = 128
    mlp_dim: int = 512
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    stochastic_depth_rate: float = 0.0
    norm_position: str = "post"
    norm_epsilon: float = 1e-12
    activation: str = "gelu"
    init_scale: float = 0.02
    dtype: str = "float32"
    param_dtype: str = "float32"

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.model_dim // self.num_heads

    @property
    def is_random(self) -> bool:
        """Whether training drops anything, so that it needs random keys."""
        rates = self.dropout_rate, self.attention_dropout_rate
        return any(rates) or self.stochastic_depth_rate > 0

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        sizes = dict(num_layers=1, num_heads=1, model_dim=1, mlp_dim=1)
        yield from at_least(self, **sizes, norm_epsilon=0, init_scale=0)
        yield from between(self, dropout_rate=(0, 0.999))
        yield from between(self, attention_dropout_rate=(0, 0.999))
        yield from between(self, stochastic_depth_rate=(0, 0.999))
        yield from one_of(self, norm_position=("post", "pre"))
        yield from one_of(self, activation=tuple(ACTIVATIONS))
        yield from one_of(self, dtype=DTYPES, param_dtype=DTYPES)
        if self.num_heads > 0 and self.model_dim % self.num_heads:
            yield (
                f"model_dim={self.model_dim} is not divisible by"
                f" num_heads={self.num_heads}. Use a number of heads that divides it."
            )


ACTIVATIONS = {
    # By erf, as in the paper; by erfc, as in jax.nn.gelu, it takes twice the time.
    "gelu": lambda x: 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def round_up(size: int, multiple: int) -> int:
    """Returns the lowest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


def normal(scale: float) -> nnx.Initializer:
    """Returns the initializer of all weights: normal with deviation ``scale``."""
    return nnx.initializers.normal(scale)


def layer_norm(config: BlockConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Returns a norm over the last dim, computed in float32.

    Paper: arXiv:1607.06450.
    """
    return nnx.LayerNorm(
        config.model_dim,
        epsilon=config.norm_epsilon,
        dtype=jnp.float32,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def linear(config: BlockConfig, out_dim: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns a linear map with bias, ``(..., D)`` to ``(..., out_dim)``."""
    return nnx.Linear(
        config.model_dim,
        out_dim,
        kernel_init=normal(config.init_scale),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def fold_keys(keys_B: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """Returns new keys for the part ``index`` of the model; None stays None."""
    if keys_B is None:
        return None
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, index)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Zeroes a share ``rate`` of ``x`` and scales the rest up.

    Args:
        x: Shape ``(B, ...)``.
        rate: Share to drop; 0 returns ``x``.
        keys_B: One key per sample; None switches dropout off.

    Returns:
        The shape and dtype of ``x``. The mask of a sample depends on its key alone.
    """
    if keys_B is None or rate == 0.0:
        return x
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))
    return jnp.where(keep(keys_B), x / (1 - rate), jnp.zeros_like(x))


def stochastic_depth(
    branch: jax.Array, rate: float | jax.Array, keys_B: jax.Array | None
) -> jax.Array:
    """Zeroes the whole ``branch`` of a share ``rate`` of the samples.

    Args:
        branch: Shape ``(B, ...)``, to be added to a residual stream.
        rate: Below 1; may be computed at run time.
        keys_B: One key per sample, which alone decides; None keeps all.

    Returns:
        The shape and dtype of ``branch``; what is kept is scaled up.
    """
    if keys_B is None:
        return branch
    keep_B = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate))(keys_B)
    scale_B = jnp.where(keep_B, 1 / (1 - rate), 0).astype(branch.dtype)
    return branch * scale_B.reshape(-1, *[1] * (branch.ndim - 1))


def depth_rate(config: BlockConfig, layer: int | jax.Array) -> float | jax.Array:
    """Returns the rate of `stochastic_depth` in the block of index ``layer``."""
    return config.stochastic_depth_rate * layer / max(config.num_layers - 1, 1)


class Vocabulary(nnx.Module):
    """Token embedding and its transpose, the output layer (arXiv:1608.05859).

    The table has ``padded_size`` rows. Tokens never name the rows past ``size``, and
    their logits are the lowest float, so that they take no probability.
    """

    def __init__(
        self, size: int, padded_size: int, config: BlockConfig, *, rngs: nnx.Rngs
    ):
        self.size = size
        self.dtype = config.dtype
        init = normal(config.init_scale)
        shape = (padded_size, config.model_dim)
        self.embedding = nnx.Param(init(rngs.params(), shape, config.param_dtype))

    def embed(self, tokens_BL: jax.Array) -> jax.Array:
        """Looks the tokens up: ``(B, L)`` to ``(B, L, D)``."""
        return jnp.take(self.embedding[...].astype(self.dtype), tokens_BL, axis=0)

    def logits(self, h_BND: jax.Array, bias_V: jax.Array | None = None) -> jax.Array:
        """Scores every token: ``(B, N, D)`` to float32 ``(B, N, V)``."""
        table_VD = self.embedding[...]
        return vocabulary_logits(table_VD, bias_V, h_BND, size=self.size)

    def cross_entropy(
        self, h_BND: jax.Array, bias_V: jax.Array | None, targets_BN: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `losses.cross_entropy` of the logits, both ``(B, N)``."""
        return cross_entropy(self.logits(h_BND, bias_V), targets_BN)


def vocabulary_logits(
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    h_BND: jax.Array,
    *,
    size: int,
    first_token: int | jax.Array = 0,
) -> jax.Array:
    """Scores the tokens of consecutive rows of a vocabulary table.

    Args:
        table_VD: The rows.
        bias_V: Their biases; None for none.
        h_BND: What to score; its dtype is that of the products.
        size: Tokens of the whole vocabulary; a row past them is padding.
        first_token: Token of the first row given.

    Returns:
        float32 ``(B, N, V)``, the lowest float on padding.
    """
    scores_BNV = jnp.einsum(
        "bnd,vd->bnv",
        h_BND,
        table_VD.astype(h_BND.dtype),
        preferred_element_type=jnp.float32,
    )
    if bias_V is not None:
        scores_BNV += bias_V.astype(jnp.float32)[None, None]
    is_token_V = first_token + jnp.arange(table_VD.shape[0]) < size
    return jnp.where(is_token_V, scores_BNV, jnp.finfo(jnp.float32).min)


class Attention(nnx.Module):
    """Multi-head self-attention (arXiv:1706.03762, section 3.2)."""

    def __init__(self, config: BlockConfig, *, out_scale: float, rngs: nnx.Rngs):
        self.config = config
        heads = (config.num_heads, config.head_dim)
        self.qkv = nnx.LinearGeneral(
            config.model_dim,
            (3, *heads),
            kernel_init=normal(config.init_scale),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.out = nnx.LinearGeneral(
            heads,
            config.model_dim,
            axis=(-2, -1),
            kernel_init=normal(out_scale),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

    def __call__(
        self, x_BLD: jax.Array, mask: jax.Array | None, keys_B: jax.Array | None
    ) -> jax.Array:
        """Mixes positions; the shape stays ``(B, L, D)``.

        Args:
            x_BLD: Input.
            mask: Boolean, broadcastable to ``(B, H, L, L)``, True where a query (dim
                2) may see a key (dim 3). None lets all see all.
            keys_B: Keys of the dropout on the probabilities, or None.
        """
        qkv = checkpoint_name(self.qkv(x_BLD), "qkv")
        q_BLHK, k_BLHK, v_BLHK = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scale = 1 / math.sqrt(self.config.head_dim)
        scores_BHLL = jnp.einsum(
            "bqhk,bthk->bhqt",
            q_BLHK * scale,
            k_BLHK,
            preferred_element_type=jnp.float32,
        )
        if mask is not None:
            scores_BHLL = jnp.where(mask, scores_BHLL, jnp.finfo(jnp.float32).min)
        probs_BHLL = jax.nn.softmax(scores_BHLL).astype(x_BLD.dtype)
        probs_BHLL = dropout(probs_BHLL, self.config.attention_dropout_rate, keys_B)
        values_BLHK = jnp.einsum("bhqt,bthk->bqhk", probs_BHLL, v_BLHK)
        return self.out(checkpoint_name(values_BLHK, "attention_values"))


class Mlp(nnx.Module):
    """Position-wise feed-forward network (arXiv:1706.03762, section 3.3)."""

    def __init__(self, config: BlockConfig, *, out_scale: float, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[config.activation]
        self.up = linear(config, config.mlp_dim, rngs=rngs)
        self.down = nnx.Linear(
            config.mlp_dim,
            config.model_dim,
            kernel_init=normal(out_scale),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Maps each position on its own; the shape stays ``(B, L, D)``."""
        h_BLF = checkpoint_name(self.up(x_BLD), "mlp_up")
        return self.down(self.activation(h_BLF))


class Block(nnx.Module):
    """One transformer layer: attention and MLP, each with residual and norm."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.config = config
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
        mask: jax.Array | None,
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
            y_BLD = self.attention(h_BLD, mask, fold_keys(keys_B, 0))
            y_BLD = checkpoint_name(y_BLD, "attention_out")
            return self._drop(y_BLD, fold_keys(keys_B, 1), layer)

        def transform(h_BLD: jax.Array) -> jax.Array:
            y_BLD = checkpoint_name(self.mlp(h_BLD), "mlp_down")
            return self._drop(y_BLD, fold_keys(keys_B, 2), layer)

        dtype = x_BLD.dtype
        if self.config.norm_position == "pre":
            x_BLD += attend(self.attention_norm(x_BLD).astype(dtype))
            return x_BLD + transform(self.mlp_norm(x_BLD).astype(dtype))
        x_BLD = self.attention_norm(x_BLD + attend(x_BLD)).astype(dtype)
        return self.mlp_norm(x_BLD + transform(x_BLD)).astype(dtype)

    def _drop(
        self, branch: jax.Array, keys_B: jax.Array | None, layer: int | jax.Array
    ) -> jax.Array:
        branch = dropout(branch, self.config.dropout_rate, fold_keys(keys_B, 0))
        if self.config.stochastic_depth_rate == 0:
            return branch
        # Equal blocks run as one program: only at run time does one know its depth.
        rate = depth_rate(self.config, layer)
        return stochastic_depth(branch, rate, fold_keys(keys_B, 1))


def run_blocks(
    blocks: nnx.List, x_BLD: jax.Array, mask: jax.Array | None, keys_B: jax.Array | None
) -> jax.Array:
    """Applies blocks one after the other, on one device; see `Block`."""
    for layer, block in enumerate(blocks):
        x_BLD = block(x_BLD, mask, fold_keys(keys_B, 1 + layer), layer)
    return x_BLD
