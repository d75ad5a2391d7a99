"""A published GPT-2 is continued as `transformers` continues it."""

import dataclasses

import pytest

from launch import convert, generation
from launch.generation import GenerationConfig
from launch.trained import open_trained
from models import stopping
from models.sampling import SamplingConfig
from tests.launch import trained_runs

pytestmark = pytest.mark.slow
END = 5
TEXTS = ([3, 141, 59, 26], [53], [58, 97, 93, 23, 84, 62])


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A GPT-2 with random weights of their software, and the run made of its files."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=260,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    directory = tmp_path_factory.mktemp("published")
    model.save_pretrained(directory / "hf")
    tokenizer = trained_runs.byte_tokenizer().to_str()
    (directory / "hf" / "tokenizer.json").write_text(tokenizer)
    arguments = [str(directory / "hf"), str(directory / "run")]
    assert convert.main(["--from=hf", "--to=sbp", *arguments]) == 0
    return model, open_trained(str(directory / "run"))


def theirs(model, text, **how):
    import torch

    tokens = torch.tensor([text])
    with torch.no_grad():
        found = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **how
        )
    rows = [row[len(text) :].tolist() for row in found]
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


def ours(trained, **how):
    table = stopping.build_table([END], (), {}, num_tokens=384)
    config = dataclasses.replace(GenerationConfig(max_new_tokens=20), **how)
    found = generation.build(trained, config, table).generate(TEXTS)
    return [[list(text.tokens) for text in texts] for texts in found]


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_best_tokens_are_the_same(published, penalty):
    model, trained = published
    assert trained.tokenizer.decode([258]) == "def"
    sampling = SamplingConfig(repetition_penalty=penalty)
    found = ours(trained, sampling=sampling)
    for text, rows in zip(TEXTS, found, strict=True):
        expected = theirs(model, text, max_new_tokens=20, repetition_penalty=penalty)
        assert rows == expected


@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0])
def test_beams_are_the_same(published, length_penalty):
    model, trained = published
    how = {"num_beams": 4, "length_penalty": length_penalty}
    found = ours(trained, num_samples=3, **how)
    for text, rows in zip(TEXTS, found, strict=True):
        expected = theirs(
            model,
            text,
            max_new_tokens=20,
            num_return_sequences=3,
            early_stopping="never",
            **how,
        )
        assert rows == expected
