"""BERT with the heads it is fine-tuned with: a class of a text, or of each token.

Embeddings, blocks and pooler are those of `models.bert`, under the same paths, so the
parameters of a pre-trained BERT are theirs too (arXiv:1810.04805, sections 4 and 5.3).
Dropout is that of the encoder alone: there is none between it and the head.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from models import bert, layers
from models.classification import Batch, SampleClassifier, Sums, class_counts
from models.losses import cross_entropy
from models.rules import at_least


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BertHeadConfig(bert.BertConfig):
    """Sizes of a BERT that tells classes apart.

    Attributes:
        num_classes: Classes to tell apart.
    """

    num_classes: int = 2

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from bert.BertConfig.broken_rules(self)
        yield from at_least(self, num_classes=2)


class BertClassifier(SampleClassifier, bert.Encoder):
    """BERT for the class of a text, or of a pair of texts.

    A batch is a dict of arrays: those of `bert.Encoder` and of `SampleClassifier`.
    """

    def __init__(self, config: BertHeadConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.pooler = layers.linear(config, config.model_dim, rngs=rngs)
        self.classifier = layers.linear(config, config.num_classes, rngs=rngs)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the score of every class, float32 ``(B, classes)``."""
        pooled_BD = jnp.tanh(self.pooler(self.normalize(x_BLD[:, 0])))
        return self.classifier(pooled_BD).astype(jnp.float32)


class BertTagger(bert.Encoder):
    """BERT for the class of each token.

    A batch is a dict of arrays: those of `bert.Encoder`; ``targets`` int32 ``(B, L)``,
    the class of each token; ``weights`` float32 ``(B, L)``, 0 on tokens that do not
    count: special ones, padding, and all pieces of a word but the first.
    """

    def __init__(self, config: BertHeadConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.classifier = layers.linear(config, config.num_classes, rngs=rngs)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the score of every class, float32 ``(B, L, classes)``."""
        return self.classifier(self.normalize(x_BLD)).astype(jnp.float32)

    def losses(self, x_BLD: jax.Array, batch: Batch) -> Sums:
        """Returns the weighted sums over the batch of loss and correctness."""
        logits, weights_BL = self.logits(x_BLD), batch["weights"]
        loss_BL, is_right_BL = cross_entropy(logits, batch["targets"])
        return {
            "tag_loss": (loss_BL * weights_BL).sum(),
            "tag_accuracy": (is_right_BL * weights_BL).sum(),
        }

    @staticmethod
    def counts(batch: Batch) -> Sums:
        """Returns what each sum of `losses` is to be divided by, over a whole batch."""
        return dict.fromkeys(("tag_loss", "tag_accuracy"), batch["weights"].sum())

    def tallies(self, x_BLD: jax.Array, batch: Batch) -> Sums:
        """Returns further sums, of which evaluation makes F1 scores."""
        logits = self.logits(x_BLD)
        return {
            "class_counts": class_counts(logits, batch["targets"], batch["weights"])
        }
