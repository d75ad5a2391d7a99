"""How parameters are split: path pattern -> component per mesh axis.

``*`` stands for one segment of the path. An axis that a row leaves out is broadcast,
so ``{}`` is broadcast everywhere. Dims are those of one block's parameter. Every
parameter of a model is matched by exactly one row, and every row matches a parameter.

The rows follow Megatron (arXiv:1909.08053, section 3): the first linear map of each
half layer is split by columns (its output dim), the second by rows (its input dim), so
that each half needs one all-reduce, and the vocabulary is split by tokens.
"""

from collections.abc import Mapping, Sequence

import sbp
from models import bert
from sbp.signature import Component, Split

Rows = Mapping[str, Mapping[str, Component]]

BLOCK: Rows = {
    "blocks/*/attention/qkv/kernel": {"tensor": sbp.split(2)},  # (D, 3, H, K)
    "blocks/*/attention/qkv/bias": {"tensor": sbp.split(1)},  # (3, H, K)
    "blocks/*/attention/out/kernel": {"tensor": sbp.split(0)},  # (H, K, D)
    "blocks/*/attention/out/bias": {},
    "blocks/*/attention_norm/*": {},
    "blocks/*/mlp/up/kernel": {"tensor": sbp.split(1)},  # (D, F)
    "blocks/*/mlp/up/bias": {"tensor": sbp.split(0)},
    "blocks/*/mlp/down/kernel": {"tensor": sbp.split(0)},  # (F, D)
    "blocks/*/mlp/down/bias": {},
    "blocks/*/mlp_norm/*": {},
}

# All stages share the tokens, so that none computes the whole output layer.
VOCABULARY = {"stage": sbp.split(0), "tensor": sbp.split(0)}

BERT_ENCODER: Rows = {
    **BLOCK,
    "embeddings/token/embedding": VOCABULARY,  # (V, D)
    "embeddings/position": {},
    "embeddings/segment": {},
}

BERT: Rows = {
    "pooler/*": {},
    "masked_lm/transform/*": {},
    "masked_lm/norm/*": {},
    "masked_lm/bias": VOCABULARY,
    "next_sentence/*": {},
}

GPT2: Rows = {
    **BLOCK,
    "token/embedding": VOCABULARY,  # (V, D)
    "position": {},
    "final_norm/*": {},
}

VIT: Rows = {
    **BLOCK,
    "patches/*": {},
    "final_norm/*": {},
    "classifier/*": {},
}


def bert_encoder_rows(config: bert.BertConfig) -> Rows:
    """Returns the rows that all with a BERT share: its config says where norms are."""
    is_post = config.norm_position == "post"
    return {**BERT_ENCODER, "embeddings/norm/*" if is_post else "final_norm/*": {}}


def bert_rows(config: bert.BertConfig) -> Rows:
    """Returns the table of a BERT."""
    return {**bert_encoder_rows(config), **BERT}


def bert_classifier_rows(config: bert.BertConfig) -> Rows:
    """Returns the table of a BERT that classifies texts."""
    return {**bert_encoder_rows(config), "pooler/*": {}, "classifier/*": {}}


def bert_tagger_rows(config: bert.BertConfig) -> Rows:
    """Returns the table of a BERT that classifies tokens."""
    return {**bert_encoder_rows(config), "classifier/*": {}}


def without_axis(rows: Rows, axis_name: str) -> Rows:
    """Returns the table with everything broadcast along one mesh axis."""
    return {
        pattern: {name: c for name, c in row.items() if name != axis_name}
        for pattern, row in rows.items()
    }


def match_rows(rows: Rows, paths: Sequence[str]) -> dict[str, Mapping[str, Component]]:
    """Returns the row of each parameter.

    Args:
        rows: The table.
        paths: Parameter paths, segments separated by ``/``.

    Returns:
        Path -> component per mesh axis, in the order of ``paths``.

    Raises:
        ValueError: If a parameter is matched by no row or by several, or a row by no
            parameter; all of them are named.

    Example:
        >>> match_rows({"mlp/*": {"tensor": sbp.split(0)}}, ["mlp/bias"])
        {'mlp/bias': {'tensor': sbp.split(0)}}
    """
    matches = {
        path: [pattern for pattern in rows if is_match(pattern, path)] for path in paths
    }
    used = {pattern for patterns in matches.values() for pattern in patterns}
    problems = [
        f"  parameter {path!r} is matched by "
        + (f"{len(found)} rows: {found}." if found else "no row.")
        for path, found in matches.items()
        if len(found) != 1
    ] + [f"  row {row!r} matches no parameter." for row in rows if row not in used]
    if problems:
        raise ValueError(
            "Every parameter needs exactly one row of the sharding table, and every"
            " row a parameter:\n" + "\n".join(problems) + "\nAdd, remove or narrow"
            " rows until each parameter has one."
        )
    return {path: rows[found[0]] for path, found in matches.items()}


def adapter_rows(
    row: Mapping[str, Component], *, num_in: int
) -> tuple[dict[str, Component], dict[str, Component]]:
    """Returns the rows of the two maps that stand beside a linear map.

    They are ``(*in, rank)`` and ``(rank, *out)``. Where the outputs of the kernel are
    split, those of the second are; where its inputs are, those of the first.

    Args:
        row: Of the kernel, ``(*in, *out)``.
        num_in: Dims of the input.

    Example:
        >>> adapter_rows({"tensor": sbp.split(2)}, num_in=1)  # columns
        ({}, {'tensor': sbp.split(2)})
        >>> adapter_rows({"tensor": sbp.split(0)}, num_in=2)  # rows
        ({'tensor': sbp.split(0)}, {})
    """
    first: dict[str, Component] = {}
    second: dict[str, Component] = {}
    for axis, component in row.items():
        if isinstance(component, Split):
            if component.dim < num_in:
                first[axis] = component
            else:
                second[axis] = sbp.split(component.dim - num_in + 1)
    return first, second


def is_match(pattern: str, path: str) -> bool:
    """Whether a path is of a pattern, ``*`` standing for any one segment.

    Example:
        >>> [is_match("mlp/*", path) for path in ("mlp/bias", "mlp", "mlp/up/bias")]
        [True, False, False]
    """
    wanted, given = pattern.split("/"), path.split("/")
    return len(wanted) == len(given) and all(
        w in ("*", g) for w, g in zip(wanted, given, strict=True)
    )
