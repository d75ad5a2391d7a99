"""Single-device Flax NNX models. Nothing here knows about a mesh.

Shape letters, at the end of the names of tensors: **B** batch, **L** length,
**D** model, **H** heads, **K** head, **F** mlp, **V** vocabulary, **N** predicted
positions. A training model has this form, whatever its family:

- ``blocks``: an ``nnx.List`` of equal blocks, ``block(x_BLD, mask, keys_B, layer)``,
  where ``layer`` is the index of the block, known at run time alone;
- ``embed(batch, keys_B)``: what comes before the blocks;
- ``attention_mask(batch)``: what every block sees besides its input, no parameters;
- ``losses(x_BLD, batch)``: what comes after them, *sums* over the batch by name;
- ``counts(batch)``: what each of these sums is to be divided by, no parameters;
- ``tallies(x_BLD, batch)``, of models that tell classes apart: further sums, which
  evaluation alone adds up.

``keys_B`` is one PRNG key per sample, or None to switch dropout off: a mask
depends on the sample, never on how samples are grouped or placed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from models import bert, bert_heads, gpt2, sharding, vit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """What the trainer needs to know of a model.

    Attributes:
        config: Dataclass of its sizes.
        module: Makes it, ``module(config, rngs=rngs)``.
        rows: Its sharding table, by config.
        heads: Names of its modules that belong to a task: one that begins with a
            pre-trained model may begin with a new one of these.
    """

    config: type
    module: Callable[..., Any]
    rows: Callable[[Any], sharding.Rows]
    heads: frozenset[str] = frozenset()


MODELS = {
    "bert": ModelFamily(
        config=bert.BertConfig,
        module=bert.Bert,
        rows=sharding.bert_rows,
        heads=frozenset({"pooler", "masked_lm", "next_sentence"}),
    ),
    "bert_classifier": ModelFamily(
        config=bert_heads.BertHeadConfig,
        module=bert_heads.BertClassifier,
        rows=sharding.bert_classifier_rows,
        heads=frozenset({"pooler", "classifier"}),
    ),
    "bert_tagger": ModelFamily(
        config=bert_heads.BertHeadConfig,
        module=bert_heads.BertTagger,
        rows=sharding.bert_tagger_rows,
        heads=frozenset({"classifier"}),
    ),
    "gpt2": ModelFamily(
        config=gpt2.Gpt2Config, module=gpt2.Gpt2, rows=lambda config: sharding.GPT2
    ),
    "vit": ModelFamily(
        config=vit.VitConfig,
        module=vit.Vit,
        rows=lambda config: sharding.VIT,
        heads=frozenset({"classifier"}),
    ),
}
