"""BERT with its two pre-training heads (arXiv:1810.04805).

The encoder is the paper's, with the layer norm after each residual sum;
``norm_position="pre"`` gives the variant that Megatron and LiBai train. The masked-LM
head runs on the predicted positions alone.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from models import block, layers, packing, vocabulary
from models.losses import cross_entropy
from models.masks import AttentionMask
from models.rules import at_least

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(layers.BlockConfig):
    """Sizes of a BERT. Those of the block come from `layers.BlockConfig`.

    Attributes:
        vocab_size: Tokens.
        vocab_multiple: The table has ``vocab_size`` rows rounded up to a multiple of
            this, so that it can be split.
        max_len: Positions.
        loss_chunk_size: Predictions that are scored at a time for the loss, at most;
            None for all. Their scores are float32 ``(loss_chunk_size, vocab_size)``.
        num_segments: Segment (token type) embeddings.
    """

    vocab_size: int = 30522
    vocab_multiple: int = 128
    max_len: int = 512
    loss_chunk_size: int | None = 256
    num_segments: int = 2

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the vocabulary table."""
        return layers.round_up(self.vocab_size, self.vocab_multiple)

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from layers.BlockConfig.broken_rules(self)
        sizes = dict(vocab_size=1, vocab_multiple=1, max_len=1, num_segments=2)
        yield from at_least(self, **sizes, loss_chunk_size=1)


SIZES = {
    "tiny": BertConfig(num_layers=2, model_dim=128, num_heads=2, mlp_dim=512),
    "base": BertConfig(num_layers=12, model_dim=768, num_heads=12, mlp_dim=3072),
    "large": BertConfig(num_layers=24, model_dim=1024, num_heads=16, mlp_dim=4096),
}


class Embeddings(nnx.Module):
    """Sum of token, position and segment embeddings, then norm and dropout."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config, self.drop = config, layers.dropout
        init = layers.normal(config.init_scale)
        dim, dtype = config.model_dim, config.param_dtype
        self.token = vocabulary.Vocabulary(
            config.vocab_size,
            config.padded_vocab_size,
            config,
            loss_chunk_size=config.loss_chunk_size,
            rngs=rngs,
        )
        self.position = nnx.Param(init(rngs.params(), (config.max_len, dim), dtype))
        self.segment = nnx.Param(init(rngs.params(), (config.num_segments, dim), dtype))
        if config.norm_position == "post":
            self.norm = layers.layer_norm(config, rngs=rngs)

    def __call__(self, batch: Batch, keys_B: jax.Array | None) -> jax.Array:
        """Embeds the tokens of a batch as ``(B, L, D)``."""
        x_BLD = self.token.embed(batch["tokens"])
        positions = packing.position_embedding(self.position[...], batch)
        segments_BLD = jnp.take(self.segment[...], batch["segments"], axis=0)
        x_BLD = layers.add_in_float32(x_BLD, positions)
        x_BLD = layers.add_in_float32(x_BLD, segments_BLD)
        if self.config.norm_position == "post":
            x_BLD = self.norm(x_BLD).astype(x_BLD.dtype)
        return self.drop(x_BLD, self.config.dropout_rate, keys_B)


class Encoder(nnx.Module):
    """Embeddings and blocks, which every model with a BERT has under these names.

    Of a batch it reads ``tokens`` and ``segments`` int32 ``(B, L)``; ``is_token``
    boolean ``(B, L)``, False on padding; and, where rows hold several texts,
    ``documents`` as in `models.packing`.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = Embeddings(config, rngs=rngs)
        self.blocks = nnx.List(
            [block.Block(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        if config.norm_position == "pre":
            self.final_norm = layers.layer_norm(config, rngs=rngs)

    def embed(self, batch: Batch, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns the input of the first block, ``(B, L, D)``."""
        return self.embeddings(batch, keys_B).astype(self.config.dtype)

    @staticmethod
    def attention_mask(batch: Batch) -> AttentionMask:
        """Returns the mask: nobody looks at padding or other documents."""
        return AttentionMask(is_key=batch["is_token"], documents=batch.get("documents"))

    def encode(self, batch: Batch, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns the output of the last block, ``(B, L, D)``, on one device."""
        x_BLD = self.embed(batch, layers.fold_keys(keys_B, 0))
        mask = self.attention_mask(batch)
        return block.run_blocks(self.blocks, x_BLD, mask, keys_B)

    def normalize(self, x: jax.Array) -> jax.Array:
        """Returns what heads read, of the output of the last block, ``(..., D)``."""
        if self.config.norm_position == "post":
            return x
        return self.final_norm(x).astype(x.dtype)


def take_positions(x_BLD: jax.Array, positions_BN: jax.Array) -> jax.Array:
    """Returns what stands at some positions, ``(B, N, D)``."""
    return jnp.take_along_axis(x_BLD, positions_BN[:, :, None], axis=1)


class MaskedLmHead(nnx.Module):
    """Predicts the tokens at chosen positions; the output layer is the embedding."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.take = take_positions
        self.transform = layers.linear(config, config.model_dim, rngs=rngs)
        self.activation = layers.ACTIVATIONS[config.activation]
        self.norm = layers.layer_norm(config, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.padded_vocab_size, config.param_dtype))

    def __call__(self, x_BLD: jax.Array, positions_BN: jax.Array) -> jax.Array:
        """Returns what the vocabulary scores, ``(B, N, D)``, at ``positions_BN``."""
        h_BND = self.take(x_BLD, positions_BN)
        h_BND = self.activation(self.transform(h_BND))
        return self.norm(h_BND).astype(x_BLD.dtype)


class Bert(Encoder):
    """BERT for pre-training: masked language model and next-sentence prediction.

    A batch is a dict of arrays: those of `Encoder`; ``positions`` and ``targets`` int32
    ``(B, N)``, the positions to predict and their tokens, with ``weights`` float32
    ``(B, N)`` 0 where fewer than N are predicted; and ``is_random_next`` int32
    ``(B,)``, 1 where the second segment does not follow the first, with
    ``sample_weights`` float32 ``(B,)``, 0 on samples that only fill up a batch.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.pooler = layers.linear(config, config.model_dim, rngs=rngs)
        self.masked_lm = MaskedLmHead(config, rngs=rngs)
        self.next_sentence = layers.linear(config, 2, rngs=rngs)

    def pool(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the pooled first position, ``(B, D)``."""
        return jnp.tanh(self.pooler(self.normalize(x_BLD[:, 0])))

    def logits(self, x_BLD: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns float32 masked-LM ``(B, N, V)`` and next-sentence ``(B, 2)`` logits.

        Args:
            x_BLD: Output of the last block.
            batch: Of which only ``positions`` are read.
        """
        h_BND = self.masked_lm(self.normalize(x_BLD), batch["positions"])
        tokens_BNV = self.embeddings.token.logits(h_BND, self.masked_lm.bias[...])
        return tokens_BNV, self._next_sentence_logits(x_BLD)

    def losses(self, x_BLD: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Returns the weighted sums over the batch of loss and correctness.

        Divided by `counts` of the whole batch these are the mean losses and accuracies
        of both heads. The training loss is the sum of the ``_loss`` entries.
        """
        h_BND = self.masked_lm(self.normalize(x_BLD), batch["positions"])
        mlm_loss, num_mlm_correct = self.embeddings.token.cross_entropy(
            h_BND, self.masked_lm.bias[...], batch["targets"], batch["weights"]
        )
        nsp_B, nsp_correct_B = cross_entropy(
            self._next_sentence_logits(x_BLD), batch["is_random_next"]
        )
        weights_B = batch["sample_weights"]
        return {
            "mlm_loss": mlm_loss,
            "nsp_loss": (nsp_B * weights_B).sum(),
            "mlm_accuracy": num_mlm_correct,
            "nsp_accuracy": (nsp_correct_B * weights_B).sum(),
        }

    @staticmethod
    def counts(batch: Batch) -> dict[str, jax.Array]:
        """Returns what each sum of `losses` is to be divided by, over a whole batch."""
        num_predicted = batch["weights"].sum()
        num_samples = batch["sample_weights"].sum()
        return {
            "mlm_loss": num_predicted,
            "nsp_loss": num_samples,
            "mlm_accuracy": num_predicted,
            "nsp_accuracy": num_samples,
        }

    def _next_sentence_logits(self, x_BLD: jax.Array) -> jax.Array:
        return self.next_sentence(self.pool(x_BLD)).astype(jnp.float32)
