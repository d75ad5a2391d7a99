"""What the models share: sizes of a block, norms, linear maps, dropout."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.rules import at_least, between, one_of

DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "plain", "blocked", "cudnn")


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
        attention: What computes attention: ``"plain"``, ``"blocked"`` or ``"cudnn"``,
            see `models.attention`; ``"auto"`` leaves it to the launcher, and is plain
            in a model by itself.
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
    attention: str = "auto"
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
        yield from one_of(self, attention=ATTENTIONS)
        yield from self._broken_cudnn_rules()
        if self.num_heads > 0 and self.model_dim % self.num_heads:
            yield (
                f"model_dim={self.model_dim} is not divisible by"
                f" num_heads={self.num_heads}. Use a number of heads that divides it."
            )

    def _broken_cudnn_rules(self) -> Iterator[str]:
        if self.attention != "cudnn":
            return
        if self.dtype == "float32":
            yield (
                "attention='cudnn' computes in float16 or bfloat16, but"
                " dtype='float32'. Use one of these, or another attention."
            )
        if self.attention_dropout_rate > 0:
            yield (
                "attention='cudnn' drops no weights, but attention_dropout_rate="
                f"{self.attention_dropout_rate}. Set it to 0, or use 'plain'."
            )
        if self.num_heads > 0 and (self.head_dim % 8 or self.head_dim > 128):
            yield (
                "attention='cudnn' wants heads of a multiple of 8 up to 128, but"
                f" model_dim={self.model_dim} / num_heads={self.num_heads} ="
                f" {self.head_dim}. Use another number of heads, or 'plain'."
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


class Linear(nnx.LinearGeneral):
    """A linear map of the last dims: product in ``dtype``, bias added in float32.

    So the gradient of the bias, a sum over all positions, is summed in float32; in
    bfloat16, eight bits, such a sum stops growing at some hundred terms.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Maps ``(..., *in)`` to ``(..., *out)``."""
        x, kernel = self.promote_dtype((inputs, self.kernel[...]), dtype=self.dtype)
        num_in = len(self.in_features)
        dims = tuple(range(x.ndim - num_in, x.ndim)), tuple(range(num_in))
        product = self.dot_general or jax.lax.dot_general
        y = product(x, kernel, (dims, ((), ())), out_sharding=out_sharding)
        assert self.bias is not None, "every linear map here has a bias"
        return add_in_float32(y, self.bias[...])


def linear(
    config: BlockConfig,
    out_dims: int | tuple[int, ...],
    *,
    in_dims: int | tuple[int, ...] | None = None,
    scale: float | None = None,
    rngs: nnx.Rngs,
) -> Linear:
    """Returns a linear map with bias, ``(..., *in_dims)`` to ``(..., *out_dims)``.

    Args:
        config: Of the model.
        out_dims: Sizes of what the last dims are mapped to.
        in_dims: Sizes of these; None for ``model_dim``.
        scale: Of the initial weights; None for the model's.
        rngs: Of the weights.
    """
    num_in = len(in_dims) if isinstance(in_dims, tuple) else 1
    return Linear(
        config.model_dim if in_dims is None else in_dims,
        out_dims,
        axis=tuple(range(-num_in, 0)),
        kernel_init=normal(config.init_scale if scale is None else scale),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def add_in_float32(x: jax.Array, addend: jax.Array) -> jax.Array:
    """Returns ``x`` plus what is the same along its first dims, in the dtype of ``x``.

    The gradient of ``addend``, a sum over these dims, is summed in float32.
    """
    shape = (1,) * (x.ndim - addend.ndim) + addend.shape
    total = x.astype(jnp.float32) + addend.astype(jnp.float32).reshape(shape)
    return total.astype(x.dtype)


def fold_keys(keys_B: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """Returns new keys for the part ``index`` of the model; None stays None."""
    if keys_B is None:
        return None
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, index)


def dropout(
    x: jax.Array, rate: float, keys_B: jax.Array | None, *, name: str = ""
) -> jax.Array:
    """Zeroes a share ``rate`` of ``x`` and scales the rest up.

    Args:
        x: Shape ``(B, ...)``.
        rate: Share to drop; 0 returns ``x``.
        keys_B: One key per sample; None switches dropout off.
        name: Of the mask, for `models.remat`; none by default.

    Returns:
        The shape and dtype of ``x``. The mask of a sample depends on its key alone.
    """
    if keys_B is None or rate == 0.0:
        return x
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))
    mask = checkpoint_name(keep(keys_B), name) if name else keep(keys_B)
    return jnp.where(mask, x / (1 - rate), jnp.zeros_like(x))


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
