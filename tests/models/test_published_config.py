"""``config.json``: which model it means, and what its classes are called."""

import pytest

from models import published_config
from models.bert_heads import BertHeadConfig
from models.vit import VitConfig

NAMES = {"0": "cat", "1": "dog", "2": "cow"}
CLASSIFIER = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "id2label": NAMES,
}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("BertForPreTraining", "bert"),
        ("BertForMaskedLM", "bert"),
        ("BertForSequenceClassification", "bert_classifier"),
        ("BertForTokenClassification", "bert_tagger"),
        (None, "bert"),
    ],
)
def test_architecture_says_which_head_a_bert_has(architecture, name):
    values = {"model_type": "bert", "architectures": architecture and [architecture]}

    assert published_config.from_published(values)[0] == name


@pytest.mark.parametrize("name", published_config.CLASSIFIERS)
def test_names_of_classes_survive_there_and_back(name):
    config_type = VitConfig if name == "vit" else BertHeadConfig
    config = config_type(num_classes=3)

    values = published_config.to_published(name, config, ("cat", "dog", "cow"))

    assert values["id2label"] == NAMES
    assert values["label2id"] == {"cat": 0, "dog": 1, "cow": 2}
    assert published_config.class_names(values) == ("cat", "dog", "cow")
    assert published_config.from_published(values) == (name, config)


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (None, {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}),
        (("cat",), {"0": "cat", "1": "LABEL_1", "2": "LABEL_2"}),
    ],
)
def test_classes_without_a_name_are_called_as_transformers_does(classes, expected):
    config = BertHeadConfig(num_classes=3)

    values = published_config.to_published("bert_tagger", config, classes)

    assert values["id2label"] == expected
    assert (published_config.class_names(values) is None) == (classes is None)


@pytest.mark.parametrize("given", [{}, {"num_labels": 4}])
def test_classes_that_are_not_named_are_counted(given):
    values = {**CLASSIFIER, "id2label": None, **given}

    _, config = published_config.from_published(values)

    assert config.num_classes == given.get("num_labels", 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"problem_type": "regression"},
            "problem_type='regression', but classifiers here tell classes apart",
        ),
        (
            {"id2label": {"1": "a", "2": "b"}},
            "id2label numbers its 2 classes 1, 2, not from 0 to 1. Number them so.",
        ),
        ({"model_type": "t5"}, "model_type='t5' is none of 'bert', 'gpt2', 'vit'."),
    ],
    ids=["problem_type", "id2label", "model_type"],
)
def test_config_of_another_kind_is_an_error(fields, message):
    with pytest.raises(ValueError, match="config.json") as error:
        published_config.from_published({**CLASSIFIER, **fields})

    assert message in str(error.value)
