"""How parameters are called and laid out in published (Hugging Face) checkpoints.

One table per model: our path -> their names and the form of the values. ``*`` stands
for the index of a layer, on both sides. Linear maps are stored ``(out, in)`` there, and
``(in, out)`` here, with heads as a dim of their own; a vocabulary is not padded there.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.bert import BertConfig

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

SAME = Form(lambda theirs, shape: theirs[0].reshape(shape), lambda ours: [ours])
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


def bert_table(config: BertConfig) -> Table:
    """Returns the table of ``BertForPreTraining``."""
    layer = "bert.encoder.layer.*"
    attention = f"{layer}.attention"
    rows = padded(config.vocab_size)
    words = "bert.embeddings.word_embeddings.weight"
    return {
        "embeddings/token/embedding": Published((words,), rows),
        "embeddings/position": Published(
            ("bert.embeddings.position_embeddings.weight",), SAME
        ),
        "embeddings/segment": Published(
            ("bert.embeddings.token_type_embeddings.weight",), SAME
        ),
        **_norm("embeddings/norm", "bert.embeddings.LayerNorm"),
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
        **_linear("pooler", "bert.pooler.dense"),
        **_linear("masked_lm/transform", "cls.predictions.transform.dense"),
        **_norm("masked_lm/norm", "cls.predictions.transform.LayerNorm"),
        "masked_lm/bias": Published(("cls.predictions.bias",), rows),
        **_linear("next_sentence", "cls.seq_relationship"),
    }
