"""Vision Transformer, an image classifier (arXiv:2010.11929).

Patches of an image are the tokens of a pre-norm encoder. The class is read off a token
of its own, or off the mean of the patches (arXiv:2205.01580).
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from models import block, layers
from models.classification import Batch, SampleClassifier
from models.rules import at_least, one_of

POOLINGS = ("class_token", "mean")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig(layers.BlockConfig):
    """Sizes of a ViT. Those of the block come from `layers.BlockConfig`.

    Attributes:
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch; divides ``image_size``.
        num_channels: Values of a pixel.
        num_classes: Classes to tell apart.
        pooling: ``"class_token"``, or ``"mean"`` of the patches, without such a token.
    """

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    num_classes: int = 1000
    pooling: str = "class_token"
    norm_position: str = "pre"
    norm_epsilon: float = 1e-6

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def seq_length(self) -> int:
        """Tokens of an image, the class token included."""
        return self.num_patches + (self.pooling == "class_token")

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from layers.BlockConfig.broken_rules(self)
        sizes = dict(image_size=1, patch_size=1, num_channels=1, num_classes=1)
        yield from at_least(self, **sizes)
        yield from one_of(self, norm_position=("pre",), pooling=POOLINGS)
        if self.patch_size > 0 and self.image_size % self.patch_size:
            yield (
                f"image_size={self.image_size} is not divisible by"
                f" patch_size={self.patch_size}. Resize the images to a multiple of it."
            )


_SMALL = VitConfig(model_dim=384, num_layers=12, num_heads=6, mlp_dim=1536)
_BASE = VitConfig(model_dim=768, num_layers=12, num_heads=12, mlp_dim=3072)
_LARGE = VitConfig(model_dim=1024, num_layers=24, num_heads=16, mlp_dim=4096)
_HUGE = VitConfig(model_dim=1280, num_layers=32, num_heads=16, mlp_dim=5120)

SIZES = {
    "ti16": VitConfig(model_dim=192, num_layers=12, num_heads=3, mlp_dim=768),
    "s16": _SMALL,
    "s32": dataclasses.replace(_SMALL, patch_size=32),
    "b16": _BASE,
    "b32": dataclasses.replace(_BASE, patch_size=32),
    "l16": _LARGE,
    "l32": dataclasses.replace(_LARGE, patch_size=32),
    "h14": dataclasses.replace(_HUGE, patch_size=14),
}


class PatchEmbedding(nnx.Module):
    """Linear map of each patch, the class token, and learned positions."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        size, dim, dtype = config.patch_size, config.model_dim, config.param_dtype
        init = layers.normal(config.init_scale)
        kernel_shape = (size, size, config.num_channels, dim)
        self.kernel = nnx.Param(init(rngs.params(), kernel_shape, dtype))
        self.bias = nnx.Param(jnp.zeros(dim, dtype))
        position_shape = (config.seq_length, dim)
        self.position = nnx.Param(init(rngs.params(), position_shape, dtype))
        if config.pooling == "class_token":
            self.class_token = nnx.Param(init(rngs.params(), (dim,), dtype))

    def __call__(self, images: jax.Array) -> jax.Array:
        """Embeds images ``(B, height, width, channels)`` as ``(B, L, D)``."""
        config = self.config
        size, across = config.patch_size, config.image_size // config.patch_size
        # The product of a convolution whose stride is its window.
        patches = images.astype(config.dtype).reshape(
            -1, across, size, across, size, config.num_channels
        )
        kernel = self.kernel[...].astype(config.dtype)
        x_BLD = jnp.einsum("bipjqc,pqcd->bijd", patches, kernel)
        x_BLD = x_BLD.reshape(-1, config.num_patches, config.model_dim)
        x_BLD = layers.add_in_float32(x_BLD, self.bias[...])
        if config.pooling == "class_token":
            zeros_BD = jnp.zeros((len(x_BLD), 1, config.model_dim), x_BLD.dtype)
            token_BD = layers.add_in_float32(zeros_BD, self.class_token[...])
            x_BLD = jnp.concatenate([token_BD, x_BLD], axis=1)
        return layers.add_in_float32(x_BLD, self.position[...])


class Vit(SampleClassifier, nnx.Module):
    """ViT for image classification.

    A batch is a dict of arrays: ``images`` float ``(B, height, width, channels)``, and
    those of `SampleClassifier`.
    """

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patches = PatchEmbedding(config, rngs=rngs)
        self.blocks = nnx.List(
            [block.Block(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.final_norm = layers.layer_norm(config, rngs=rngs)
        self.classifier = layers.linear(config, config.num_classes, rngs=rngs)

    def embed(self, batch: Batch, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns the input of the first block, ``(B, L, D)``."""
        x_BLD = self.patches(batch["images"]).astype(self.config.dtype)
        return layers.dropout(x_BLD, self.config.dropout_rate, keys_B)

    @staticmethod
    def attention_mask(batch: Batch) -> None:
        """Returns None: all tokens of an image see each other."""

    def encode(self, batch: Batch, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns the output of the last block, ``(B, L, D)``, on one device."""
        x_BLD = self.embed(batch, layers.fold_keys(keys_B, 0))
        return block.run_blocks(self.blocks, x_BLD, None, keys_B)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the score of every class, float32 ``(B, classes)``."""
        if self.config.pooling == "class_token":
            pooled_BD = self.final_norm(x_BLD[:, 0])
        else:
            pooled_BD = self.final_norm(x_BLD).mean(1)
        return self.classifier(pooled_BD.astype(x_BLD.dtype)).astype(jnp.float32)
