import dataclasses

import jax
import pytest

import sbp
from models import MODELS, stacked
from models.bert import BertConfig
from models.sharding import match_rows, without_axis
from tests.models import cases

SMALL = {name: cases.load(name).config for name in cases.FAMILIES}
VARIANTS = {
    **{name: (name, config) for name, config in SMALL.items()},
    "bert_pre": ("bert", dataclasses.replace(SMALL["bert"], norm_position="pre")),
    "vit_mean": ("vit", dataclasses.replace(SMALL["vit"], pooling="mean")),
}


def shapes_of(name, config):
    """Returns the shape of each parameter, those of one block."""
    model = cases.stack(name, config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    paths = {stacked.path_of(path): leaf.shape for path, leaf in leaves}
    return {p: s[1:] if p.startswith("blocks/") else s for p, s in paths.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_one_row_and_every_row_a_parameter(variant):
    name, config = VARIANTS[variant]
    shapes = shapes_of(name, config)
    matched = match_rows(MODELS[name].rows(config), list(shapes))
    assert list(matched) == list(shapes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_split_over_tensor_is_heads_mlp_or_vocabulary(variant):
    name, config = VARIANTS[variant]
    shapes = shapes_of(name, config)
    matched = match_rows(MODELS[name].rows(config), list(shapes))
    split_sizes = {
        path: shapes[path][row["tensor"].dim]
        for path, row in matched.items()
        if "tensor" in row
    }
    expected = {
        "blocks/*/attention/qkv/kernel": config.num_heads,
        "blocks/*/attention/qkv/bias": config.num_heads,
        "blocks/*/attention/out/kernel": config.num_heads,
        "blocks/*/mlp/up/kernel": config.mlp_dim,
        "blocks/*/mlp/up/bias": config.mlp_dim,
        "blocks/*/mlp/down/kernel": config.mlp_dim,
    }
    vocabulary = {
        "bert": ["embeddings/token/embedding", "masked_lm/bias"],
        "bert_classifier": ["embeddings/token/embedding"],
        "bert_tagger": ["embeddings/token/embedding"],
        "gpt2": ["token/embedding"],
        "vit": [],
    }
    for path in vocabulary[name]:
        expected[path] = config.padded_vocab_size
    assert split_sizes == expected


def test_unmatched_and_doubly_matched_parameters_and_idle_rows_are_all_named():
    rows = {"mlp/*": {}, "*/bias": {}, "head/kernel": {}}
    with pytest.raises(ValueError, match="exactly one row") as error:
        match_rows(rows, ["mlp/bias", "mlp/kernel", "norm/scale"])
    message = str(error.value)
    assert "parameter 'mlp/bias' is matched by 2 rows: ['mlp/*', '*/bias']" in message
    assert "parameter 'norm/scale' is matched by no row" in message
    assert "row 'head/kernel' matches no parameter" in message
    assert "mlp/kernel" not in message


def test_star_stands_for_one_segment_alone():
    with pytest.raises(ValueError, match="'a/b/c' is matched by no row"):
        match_rows({"a/*": {}}, ["a/b/c"])


def test_parameter_that_a_bert_lacks_leaves_its_row_idle():
    rows = MODELS["bert"].rows(BertConfig(norm_position="pre"))
    with pytest.raises(ValueError, match="row 'final_norm/\\*' matches no parameter"):
        match_rows(rows, list(shapes_of("bert", SMALL["bert"])))


def test_table_without_an_axis_is_broadcast_along_it():
    rows = {"table": {"stage": sbp.split(0), "tensor": sbp.split(1)}, "bias": {}}
    expected = {"table": {"tensor": sbp.split(1)}, "bias": {}}
    assert without_axis(rows, "stage") == expected
