"""Sizes of models as in ``config.json`` of published (Hugging Face) checkpoints."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from models.bert import BertConfig
from models.gpt2 import Gpt2Config
from models.layers import BlockConfig
from models.vit import VitConfig

Values = Mapping[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigForm:
    """How the fields of a config are called in ``config.json``.

    Attributes:
        config: Our dataclass.
        architecture: The class of ``transformers`` that it configures.
        activation: Their name of the activation's field.
        fields: Our field -> theirs, those of equal values.
        defaults: What a field of theirs is if it is not given.
        required: What fields of theirs must be, if they are given: our models know
            nothing else.
    """

    config: type[BlockConfig]
    architecture: str
    activation: str
    fields: Mapping[str, str]
    defaults: Values
    required: Values


_ENCODER_FIELDS = {
    "model_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
    "dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
    "norm_epsilon": "layer_norm_eps",
    "init_scale": "initializer_range",
}
_BASE_SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
}

# By family, which is called the same on both sides.
CONFIG_FORMS: Mapping[str, ConfigForm] = {
    "bert": ConfigForm(
        config=BertConfig,
        architecture="BertForPreTraining",
        activation="hidden_act",
        fields={
            **_ENCODER_FIELDS,
            "vocab_size": "vocab_size",
            "max_len": "max_position_embeddings",
            "num_segments": "type_vocab_size",
        },
        defaults={
            **_BASE_SIZES,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
        },
        required={
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": ConfigForm(
        config=Gpt2Config,
        architecture="GPT2LMHeadModel",
        activation="activation_function",
        fields={
            "vocab_size": "vocab_size",
            "max_len": "n_positions",
            "model_dim": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "mlp_dim": "n_inner",
            "dropout_rate": "resid_pdrop",
            "attention_dropout_rate": "attn_pdrop",
            "norm_epsilon": "layer_norm_epsilon",
            "init_scale": "initializer_range",
        },
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "resid_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "activation_function": "gelu_new",
        },
        required={
            "add_cross_attention": False,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
        },
    ),
    "vit": ConfigForm(
        config=VitConfig,
        architecture="ViTForImageClassification",
        activation="hidden_act",
        fields={
            **_ENCODER_FIELDS,
            "image_size": "image_size",
            "patch_size": "patch_size",
            "num_channels": "num_channels",
        },
        defaults={
            **_BASE_SIZES,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "image_size": 224,
            "patch_size": 16,
            "num_channels": 3,
        },
        required={"qkv_bias": True},
    ),
}


def from_published(values: Values) -> tuple[str, Any]:
    """Returns the name of the family, as in `models.MODELS`, and its config.

    Args:
        values: Of ``config.json``.

    Raises:
        ValueError: If the model is of another family, or has a part that ours lacks;
            all such fields are named.

    Example:
        >>> name, config = from_published({"model_type": "gpt2", "n_embd": 1024})
        >>> name, config.model_dim, config.mlp_dim, config.activation
        ('gpt2', 1024, 4096, 'gelu_tanh')
    """
    name = str(values.get("model_type"))
    if name not in CONFIG_FORMS:
        raise ValueError(
            f"config.json: model_type={name!r} is none of"
            f" {', '.join(map(repr, CONFIG_FORMS))}. Use a checkpoint of one of these."
        )
    form = CONFIG_FORMS[name]
    given = {**form.defaults, **values}
    if problems := list(_problems(form, given)):
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(
            f"config.json asks for a {name} that this one is not:\n{listed}\nUse a"
            " checkpoint without these."
        )
    fields = {ours: given[theirs] for ours, theirs in form.fields.items()}
    fields["activation"] = ACTIVATIONS[given[form.activation]]
    if name == "gpt2" and fields["mlp_dim"] is None:
        fields["mlp_dim"] = 4 * fields["model_dim"]
    if name == "vit":
        fields["num_classes"] = len(given.get("id2label", (0, 1)))
    return name, form.config(**fields)


def to_published(name: str, config: Any) -> dict[str, Any]:
    """Returns the values of ``config.json`` for a config of the family ``name``.

    Raises:
        ValueError: If the published model has no such variant.

    Example:
        >>> to_published("vit", VitConfig(num_classes=2))["id2label"]
        {'0': 'LABEL_0', '1': 'LABEL_1'}
    """
    form = CONFIG_FORMS[name]
    fixed = form.config()
    for field in ("norm_position", "pooling"):
        given = dataclasses.asdict(config).get(field)
        if given != dataclasses.asdict(fixed).get(field):
            raise ValueError(
                f"{field}={given!r} has no counterpart in {form.architecture}, which"
                f" has {dataclasses.asdict(fixed)[field]!r} alone. Keep such a model in"
                " the format of this project."
            )
    fields = dataclasses.asdict(config)
    values = {theirs: fields[ours] for ours, theirs in form.fields.items()}
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    values[form.activation] = activations[config.activation]
    if name == "gpt2":
        values["embd_pdrop"] = config.dropout_rate
    if name == "vit":
        labels = {str(i): f"LABEL_{i}" for i in range(config.num_classes)}
        values["id2label"] = labels
        values["label2id"] = {label: int(i) for i, label in labels.items()}
    return {
        "architectures": [form.architecture],
        "model_type": name,
        **form.required,
        **values,
    }


def _problems(form: ConfigForm, given: Values) -> Iterator[str]:
    for field, value in form.required.items():
        if given.get(field, value) != value:
            yield f"{field}={given[field]!r}, where only {value!r} is known here."
    if given[form.activation] not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        yield f"{form.activation}={given[form.activation]!r} is none of {known}."
    if given.get("embd_pdrop", given.get("resid_pdrop")) != given.get("resid_pdrop"):
        yield (
            f"embd_pdrop={given['embd_pdrop']} differs from"
            f" resid_pdrop={given['resid_pdrop']}, where one rate is known here."
        )
