"""GPT-2, a causal language model (Radford et al., 2019).

The norms stand before attention and MLP, with one more after the last block; the output
layer is the token embedding.
"""

import dataclasses
from collections.abc import Iterator

import jax
from flax import nnx

from models import block, layers, packing, vocabulary
from models.masks import AttentionMask
from models.rules import at_least, one_of

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Config(layers.BlockConfig):
    """Sizes of a GPT-2. Those of the block come from `layers.BlockConfig`.

    Attributes:
        vocab_size: Tokens.
        vocab_multiple: The table has ``vocab_size`` rows rounded up to a multiple of
            this, so that it can be split.
        max_len: Positions.
        loss_chunk_size: Predictions that are scored at a time for the loss, at most;
            None for all. Their scores are float32 ``(loss_chunk_size, vocab_size)``.
    """

    vocab_size: int = 50257
    vocab_multiple: int = 128
    max_len: int = 1024
    loss_chunk_size: int | None = 256
    norm_position: str = "pre"
    norm_epsilon: float = 1e-5
    activation: str = "gelu_tanh"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the vocabulary table."""
        return layers.round_up(self.vocab_size, self.vocab_multiple)

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from layers.BlockConfig.broken_rules(self)
        yield from at_least(
            self, vocab_size=1, vocab_multiple=1, max_len=1, loss_chunk_size=1
        )
        yield from one_of(self, norm_position=("pre",))


SIZES = {
    "tiny": Gpt2Config(num_layers=2, model_dim=128, num_heads=4, mlp_dim=512),
    "124m": Gpt2Config(num_layers=12, model_dim=768, num_heads=12, mlp_dim=3072),
    "355m": Gpt2Config(num_layers=24, model_dim=1024, num_heads=16, mlp_dim=4096),
    "774m": Gpt2Config(num_layers=36, model_dim=1280, num_heads=20, mlp_dim=5120),
    "1.5b": Gpt2Config(num_layers=48, model_dim=1600, num_heads=25, mlp_dim=6400),
}


class Gpt2(nnx.Module):
    """GPT-2: the next token at every position.

    A batch is a dict of arrays: ``tokens`` and ``targets`` int32 ``(B, L)``, the target
    of a position being the token after it, with ``weights`` float32 ``(B, L)``, 0 where
    the loss does not count; and, where rows hold several texts, ``documents`` as in
    `models.packing`. Padding belongs at the end, with weight 0: nothing before it can
    see it.
    """

    def __init__(self, config: Gpt2Config, *, rngs: nnx.Rngs):
        self.config, self.drop = config, layers.dropout
        self.token = vocabulary.Vocabulary(
            config.vocab_size,
            config.padded_vocab_size,
            config,
            loss_chunk_size=config.loss_chunk_size,
            rngs=rngs,
        )
        shape = (config.max_len, config.model_dim)
        init = layers.normal(config.init_scale)
        self.position = nnx.Param(init(rngs.params(), shape, config.param_dtype))
        self.blocks = nnx.List(
            [block.Block(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.final_norm = layers.layer_norm(config, rngs=rngs)

    def embed(self, batch: Batch, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns the input of the first block, ``(B, L, D)``."""
        x_BLD = self.token.embed(batch["tokens"])
        positions = packing.position_embedding(self.position[...], batch)
        x_BLD = layers.add_in_float32(x_BLD, positions).astype(self.config.dtype)
        return self.drop(x_BLD, self.config.dropout_rate, keys_B)

    @staticmethod
    def attention_mask(batch: Batch) -> AttentionMask:
        """Returns the mask: nobody sees what follows, or other texts."""
        return AttentionMask(is_causal=True, documents=batch.get("documents"))

    def encode(self, batch: Batch, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns the output of the last block, ``(B, L, D)``, on one device."""
        x_BLD = self.embed(batch, layers.fold_keys(keys_B, 0))
        mask = self.attention_mask(batch)
        return block.run_blocks(self.blocks, x_BLD, mask, keys_B)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the score of every next token, float32 ``(B, L, V)``."""
        return self.token.logits(self._normalize(x_BLD))

    def losses(self, x_BLD: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Returns the weighted sums over the batch of loss and correctness.

        Divided by `counts` of the whole batch these are the mean loss in nats per token
        and the accuracy.
        """
        loss, num_correct = self.token.cross_entropy(
            self._normalize(x_BLD), None, batch["targets"], batch["weights"]
        )
        return {"lm_loss": loss, "lm_accuracy": num_correct}

    @staticmethod
    def counts(batch: Batch) -> dict[str, jax.Array]:
        """Returns what each sum of `losses` is to be divided by, over a whole batch."""
        num_predicted = batch["weights"].sum()
        return {"lm_loss": num_predicted, "lm_accuracy": num_predicted}

    def _normalize(self, x_BLD: jax.Array) -> jax.Array:
        return self.final_norm(x_BLD).astype(x_BLD.dtype)
