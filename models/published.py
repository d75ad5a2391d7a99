"""How parameters are called and laid out in published (Hugging Face) checkpoints.

One table per model: our path -> their names and the form of the values. ``*`` stands
for the index of a layer, on both sides. Linear maps are stored ``(out, in)`` there, and
``(in, out)`` here, with heads as a dim of their own; a vocabulary is not padded there.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from models.bert import BertConfig
from models.gpt2 import Gpt2Config
from models.vit import VitConfig

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How values of ours and theirs turn into each other, without arithmetic.

    Attributes:
        to_ours: From their tensors and the shape of ours to ours.
        to_theirs: Back. Only methods that arrays of NumPy and JAX share.
    """

    to_ours: Callable[[Sequence[np.ndarray], Shape], np.ndarray]
    to_theirs: Callable[[Any], list[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """One parameter of ours in their checkpoints.

    Attributes:
        names: Their names, of one tensor or of several that ours holds together.
        form: How the values turn into each other.
    """

    names: tuple[str, ...]
    form: Form


Table = Mapping[str, Published]

SAME = Form(lambda theirs, shape: theirs[0], lambda ours: [ours])
# (...) of (1, ...), and of (1, 1, ...).
ONE_DIM = Form(lambda theirs, shape: theirs[0][0], lambda ours: [ours[None]])
TWO_DIMS = Form(lambda theirs, shape: theirs[0][0, 0], lambda ours: [ours[None, None]])
TRANSPOSED = Form(lambda theirs, shape: theirs[0].T, lambda ours: [ours.T])
# (D, 3, H, K) of three (H * K, D), and its bias (3, H, K) of three (H * K,).
QKV_KERNEL = Form(
    lambda theirs, shape: np.stack([x.T for x in theirs], 1).reshape(shape),
    lambda ours: [ours[:, i].reshape(len(ours), -1).T for i in range(3)],
)
QKV_BIAS = Form(
    lambda theirs, shape: np.stack(theirs).reshape(shape),
    lambda ours: [ours[i].reshape(-1) for i in range(3)],
)
# The same of one (D, 3 * H * K), and of one (3 * H * K,).
FUSED_QKV = Form(
    lambda theirs, shape: theirs[0].reshape(shape),
    lambda ours: [ours.reshape(ours.shape[0], -1)],
)
FLAT = Form(
    lambda theirs, shape: theirs[0].reshape(shape), lambda ours: [ours.reshape(-1)]
)
# (H, K, D) of one (H * K, D).
FUSED_OUT = Form(
    lambda theirs, shape: theirs[0].reshape(shape),
    lambda ours: [ours.reshape(-1, ours.shape[-1])],
)
# (P, P, channels, D) of a convolution's (D, channels, P, P).
CONVOLUTION = Form(
    lambda theirs, shape: theirs[0].transpose(2, 3, 1, 0),
    lambda ours: [ours.transpose(3, 2, 0, 1)],
)
# (H, K, D) of (D, H * K).
OUT_KERNEL = Form(
    lambda theirs, shape: theirs[0].T.reshape(shape),
    lambda ours: [ours.reshape(-1, ours.shape[-1]).T],
)


def padded(num_rows: int) -> Form:
    """Returns the form of a table of which they have the first ``num_rows`` rows."""

    def to_ours(theirs: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
        ours = np.zeros(shape, theirs[0].dtype)
        ours[:num_rows] = theirs[0]
        return ours

    return Form(to_ours, lambda ours: [ours[:num_rows]])


def _norm(ours: str, theirs: str) -> dict[str, Published]:
    return {
        f"{ours}/scale": Published((f"{theirs}.weight",), SAME),
        f"{ours}/bias": Published((f"{theirs}.bias",), SAME),
    }


def _linear(ours: str, theirs: str, form: Form = TRANSPOSED) -> dict[str, Published]:
    return {
        f"{ours}/kernel": Published((f"{theirs}.weight",), form),
        f"{ours}/bias": Published((f"{theirs}.bias",), SAME),
    }


def _qkv(ours: str, theirs: Sequence[str]) -> dict[str, Published]:
    weights = tuple(f"{name}.weight" for name in theirs)
    biases = tuple(f"{name}.bias" for name in theirs)
    return {
        f"{ours}/kernel": Published(weights, QKV_KERNEL),
        f"{ours}/bias": Published(biases, QKV_BIAS),
    }


def _bert_encoder(config: BertConfig) -> dict[str, Published]:
    layer = "bert.encoder.layer.*"
    attention = f"{layer}.attention"
    embeddings = "bert.embeddings"
    words = f"{embeddings}.word_embeddings.weight"
    positions = f"{embeddings}.position_embeddings.weight"
    segments = f"{embeddings}.token_type_embeddings.weight"
    return {
        "embeddings/token/embedding": Published((words,), padded(config.vocab_size)),
        "embeddings/position": Published((positions,), SAME),
        "embeddings/segment": Published((segments,), SAME),
        **_norm("embeddings/norm", f"{embeddings}.LayerNorm"),
        **_qkv(
            "blocks/*/attention/qkv",
            [f"{attention}.self.{part}" for part in ("query", "key", "value")],
        ),
        **_linear(
            "blocks/*/attention/out", f"{attention}.output.dense", form=OUT_KERNEL
        ),
        **_norm("blocks/*/attention_norm", f"{attention}.output.LayerNorm"),
        **_linear("blocks/*/mlp/up", f"{layer}.intermediate.dense"),
        **_linear("blocks/*/mlp/down", f"{layer}.output.dense"),
        **_norm("blocks/*/mlp_norm", f"{layer}.output.LayerNorm"),
    }


def bert_table(config: BertConfig) -> Table:
    """Returns the table of ``BertForPreTraining``."""
    bias = Published(("cls.predictions.bias",), padded(config.vocab_size))
    return {
        **_bert_encoder(config),
        **_linear("pooler", "bert.pooler.dense"),
        **_linear("masked_lm/transform", "cls.predictions.transform.dense"),
        **_norm("masked_lm/norm", "cls.predictions.transform.LayerNorm"),
        "masked_lm/bias": bias,
        **_linear("next_sentence", "cls.seq_relationship"),
    }


def bert_classifier_table(config: BertConfig) -> Table:
    """Returns the table of ``BertForSequenceClassification``."""
    return {
        **_bert_encoder(config),
        **_linear("pooler", "bert.pooler.dense"),
        **_linear("classifier", "classifier"),
    }


def bert_tagger_table(config: BertConfig) -> Table:
    """Returns the table of ``BertForTokenClassification``, which has no pooler."""
    return {**_bert_encoder(config), **_linear("classifier", "classifier")}


def gpt2_table(config: Gpt2Config) -> Table:
    """Returns the table of ``GPT2LMHeadModel``, whose linear maps are ``(in, out)``."""
    layer = "transformer.h.*"
    return {
        "token/embedding": Published(
            ("transformer.wte.weight",), padded(config.vocab_size)
        ),
        "position": Published(("transformer.wpe.weight",), SAME),
        **_norm("blocks/*/attention_norm", f"{layer}.ln_1"),
        "blocks/*/attention/qkv/kernel": Published(
            (f"{layer}.attn.c_attn.weight",), FUSED_QKV
        ),
        "blocks/*/attention/qkv/bias": Published((f"{layer}.attn.c_attn.bias",), FLAT),
        **_linear("blocks/*/attention/out", f"{layer}.attn.c_proj", form=FUSED_OUT),
        **_norm("blocks/*/mlp_norm", f"{layer}.ln_2"),
        **_linear("blocks/*/mlp/up", f"{layer}.mlp.c_fc", form=SAME),
        **_linear("blocks/*/mlp/down", f"{layer}.mlp.c_proj", form=SAME),
        **_norm("final_norm", "transformer.ln_f"),
    }


def vit_table(config: VitConfig) -> Table:
    """Returns the table of ``ViTForImageClassification``, for class-token pooling."""
    layer = "vit.encoder.layer.*"
    attention = f"{layer}.attention.attention"
    patches = "vit.embeddings.patch_embeddings.projection"
    return {
        "patches/class_token": Published(("vit.embeddings.cls_token",), TWO_DIMS),
        "patches/position": Published(("vit.embeddings.position_embeddings",), ONE_DIM),
        **_linear("patches", patches, form=CONVOLUTION),
        **_norm("blocks/*/attention_norm", f"{layer}.layernorm_before"),
        **_qkv(
            "blocks/*/attention/qkv",
            [f"{attention}.{part}" for part in ("query", "key", "value")],
        ),
        **_linear(
            "blocks/*/attention/out",
            f"{layer}.attention.output.dense",
            form=OUT_KERNEL,
        ),
        **_norm("blocks/*/mlp_norm", f"{layer}.layernorm_after"),
        **_linear("blocks/*/mlp/up", f"{layer}.intermediate.dense"),
        **_linear("blocks/*/mlp/down", f"{layer}.output.dense"),
        **_norm("final_norm", "vit.layernorm"),
        **_linear("classifier", "classifier"),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A family in published checkpoints.

    Attributes:
        table: The names of all parameters, by config.
        prefix: Of the names of all but the heads; files of a model without heads leave
            it out.
        ignored: Names, ``*`` standing for a layer, of what is no parameter of its own:
            constants, and the output layer, which is the embedding.
    """

    table: Callable[[Any], Table]
    prefix: str
    ignored: tuple[str, ...] = ()

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the name that the table uses, by each name in a file.

        Example:
            >>> PUBLISHED["bert"].canonical_names(["embeddings.LayerNorm.beta"])
            {'embeddings.LayerNorm.beta': 'bert.embeddings.LayerNorm.bias'}
        """
        given = list(names)
        is_bare = not any(name.startswith(self.prefix) for name in given)
        prefix = self.prefix if is_bare else ""
        return {name: prefix + _modern(name) for name in given}

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of this canonical name is no parameter of its own."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


PUBLISHED: Mapping[str, PublishedModel] = {
    "bert": PublishedModel(
        table=bert_table,
        prefix="bert.",
        ignored=("bert.embeddings.position_ids", "cls.predictions.decoder.*"),
    ),
    "bert_classifier": PublishedModel(
        table=bert_classifier_table,
        prefix="bert.",
        ignored=("bert.embeddings.position_ids",),
    ),
    "bert_tagger": PublishedModel(
        table=bert_tagger_table,
        prefix="bert.",
        ignored=("bert.embeddings.position_ids", "bert.pooler.*"),
    ),
    "gpt2": PublishedModel(
        table=gpt2_table,
        prefix="transformer.",
        ignored=(
            "lm_head.weight",
            "transformer.h.*.attn.bias",
            "transformer.h.*.attn.masked_bias",
        ),
    ),
    "vit": PublishedModel(table=vit_table, prefix="vit."),
}


def _modern(name: str) -> str:
    """Returns the name that newer files use."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
