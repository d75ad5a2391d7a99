"""Sizes of models as in ``config.json`` of published (Hugging Face) checkpoints."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from models.bert import BertConfig
from models.bert_heads import BertHeadConfig
from models.gpt2 import Gpt2Config
from models.layers import BlockConfig
from models.vit import VitConfig

Values = Mapping[str, Any]

CLASSIFIERS = ("bert_classifier", "bert_tagger", "vit")  # they name their classes

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
        model_type: Their name of the family.
        architecture: The class of ``transformers`` that it configures.
        activation: Their name of the activation's field.
        fields: Our field -> theirs, those of equal values.
        defaults: What a field of theirs is if it is not given.
        required: What fields of theirs must be, if they are given: our models know
            nothing else.
    """

    config: type[BlockConfig]
    model_type: str
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


def _bert_form(config: type[BlockConfig], architecture: str) -> ConfigForm:
    return ConfigForm(
        config=config,
        model_type="bert",
        architecture=architecture,
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
    )


# By our name of the family; of one type, the first is the one that is not asked for.
CONFIG_FORMS: Mapping[str, ConfigForm] = {
    "bert": _bert_form(BertConfig, "BertForPreTraining"),
    "bert_classifier": _bert_form(BertHeadConfig, "BertForSequenceClassification"),
    "bert_tagger": _bert_form(BertHeadConfig, "BertForTokenClassification"),
    "gpt2": ConfigForm(
        config=Gpt2Config,
        model_type="gpt2",
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
        model_type="vit",
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
    name = _family_of(values)
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
    if name in CLASSIFIERS:
        fields["num_classes"] = len(_labels(given))
    return name, form.config(**fields)


def class_names(values: Values) -> tuple[str, ...] | None:
    """Returns the names of the classes, None if they have none.

    Args:
        values: Of the ``config.json`` of a classifier.

    Raises:
        ValueError: If the classes are not numbered from 0 on.

    Example:
        >>> class_names({"id2label": {"0": "cat", "1": "dog"}})
        ('cat', 'dog')
        >>> class_names({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}})
    """
    labels = _labels(values)
    return None if labels == _unnamed(len(labels)) else labels


def pixel_statistics(values: Values) -> dict[str, tuple[float, ...]]:
    """Returns by what pixels from 0 to 1 are normalized, {} if that is not given.

    Args:
        values: Of ``preprocessor_config.json``.

    Example:
        >>> pixel_statistics({"image_mean": [0.5, 0.4, 0.4], "image_std": [0.2] * 3})
        {'pixel_mean': (0.5, 0.4, 0.4), 'pixel_std': (0.2, 0.2, 0.2)}
        >>> pixel_statistics({"do_normalize": False})
        {'pixel_mean': (0.0,), 'pixel_std': (1.0,)}
    """
    if not values.get("do_normalize", True):
        return {"pixel_mean": (0.0,), "pixel_std": (1.0,)}
    names = {"pixel_mean": "image_mean", "pixel_std": "image_std"}
    return {
        ours: tuple(map(float, values[theirs]))
        for ours, theirs in names.items()
        if theirs in values
    }


def to_preprocessor(
    model: VitConfig, mean: Sequence[float], std: Sequence[float]
) -> Values:
    """Returns the values of ``preprocessor_config.json``.

    Args:
        model: Says of which size images are.
        mean: By which pixels from 0 to 1 are normalized; of all channels, or one each.
        std: Like it.
    """
    sizes = {"height": model.image_size, "width": model.image_size}

    def of_channels(values: Sequence[float]) -> list[float]:
        return list(values) * (model.num_channels if len(values) == 1 else 1)

    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": sizes,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": of_channels(mean),
        "image_std": of_channels(std),
    }


def to_published(
    name: str, config: Any, classes: Sequence[str] | None = None
) -> dict[str, Any]:
    """Returns the values of ``config.json`` for a config of the family ``name``.

    Args:
        name: Of the family.
        config: Of the model.
        classes: Names of the first classes of a classifier, or of all; the others are
            called as `transformers` does.

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
    if name in CLASSIFIERS:
        given = tuple(classes or ())
        labels = given + _unnamed(config.num_classes)[len(given) :]
        values["id2label"] = {str(i): label for i, label in enumerate(labels)}
        values["label2id"] = {label: i for i, label in enumerate(labels)}
    return {
        "architectures": [form.architecture],
        "model_type": form.model_type,
        **form.required,
        **values,
    }


def _family_of(values: Values) -> str:
    """Returns our name of the family of a ``config.json``."""
    found, architectures = values.get("model_type"), values.get("architectures") or ()
    names = [name for name, form in CONFIG_FORMS.items() if form.model_type == found]
    if not names:
        known = dict.fromkeys(form.model_type for form in CONFIG_FORMS.values())
        raise ValueError(
            f"config.json: model_type={str(found)!r} is none of"
            f" {', '.join(map(repr, known))}. Use a checkpoint of one of these."
        )
    asked = [name for name in names if CONFIG_FORMS[name].architecture in architectures]
    name = (asked or names)[0]
    kind = values.get("problem_type")
    if name in CLASSIFIERS and kind not in (None, "single_label_classification"):
        raise ValueError(
            f"config.json: problem_type={kind!r}, but classifiers here tell classes"
            " apart that exclude each other. Use a checkpoint of such a one."
        )
    return name


def _labels(values: Values) -> tuple[str, ...]:
    """Returns the names of the classes in order; `transformers` leaves out two."""
    given = values.get("id2label")
    if not given:
        return _unnamed(int(values.get("num_labels") or 2))
    names = {int(number): str(label) for number, label in given.items()}
    if sorted(names) != list(range(len(names))):
        raise ValueError(
            f"config.json: id2label numbers its {len(names)} classes"
            f" {', '.join(map(str, sorted(names)))}, not from 0 to {len(names) - 1}."
            " Number them so."
        )
    return tuple(names[number] for number in range(len(names)))


def _unnamed(num: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{number}" for number in range(num))


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
