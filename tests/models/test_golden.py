"""Logits and all gradients, against `transformers` with the same weights."""

import jax
import pytest

from tests.models import cases, make_golden
from tests.models.cases import FAMILIES, SOFTWARE_TOLERANCE, assert_close


def logits_of(name, module, x, batch):
    if name == "bert":
        masked_lm, next_sentence = module.logits(x, batch)
        size = module.config.vocab_size
        return {"masked_lm": masked_lm[..., :size], "next_sentence": next_sentence}
    if name == "gpt2":
        return {"logits": module.logits(x)[..., : module.config.vocab_size]}
    return {"logits": module.logits(x)}


def assert_same_as_published(case):
    """Compares with float64 results, so all rounding is that of the model here."""
    expected = dict(case.golden.outputs)

    def objective(params):
        loss, x = cases.stacked_objective(case, params)
        module = cases.module_of(case, params)
        return loss, logits_of(case.name, module, x, case.batch)

    program = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (loss, logits), gradients = program(case.params)
    assert float(loss) == pytest.approx(expected.pop("loss").item(), rel=1e-6)
    assert_close(logits, expected, SOFTWARE_TOLERANCE)
    assert_close(gradients, case.to_params(case.golden.gradients), SOFTWARE_TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name):
    assert_same_as_published(cases.load(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: make_golden.bert(length=128), id="bert_base"),
        pytest.param(
            lambda: make_golden.bert_classifier(length=128, num_labels=20),
            id="bert_base_classifier",
        ),
        pytest.param(
            lambda: make_golden.bert_tagger(length=128, num_labels=9),
            id="bert_base_tagger",
        ),
        pytest.param(lambda: make_golden.gpt2(length=128), id="gpt2_124m"),
        pytest.param(lambda: make_golden.vit(num_labels=1000), id="vit_b16"),
    ],
)
def test_full_size_logits_and_gradients_are_those_of_transformers(make):
    pytest.importorskip("torch", reason="the comparison runs PyTorch")
    pytest.importorskip("transformers", reason="the comparison runs its models")
    assert_same_as_published(cases.from_golden(make()))
