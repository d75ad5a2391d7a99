"""Questions in texts get the answers that their tokens have."""

import pytest

from launch import answers, generation, scoring
from launch.generation import GenerationConfig
from launch.trained import open_trained
from models import stopping
from tests.launch import trained_runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gpt2")
    trained_runs.make(directory, tokenizer=trained_runs.byte_tokenizer())
    return open_trained(str(directory))


@pytest.fixture(scope="module")
def model(trained):
    return answers.build(trained, global_batch_size=4)


def test_log_probability_of_a_text_is_that_of_its_tokens(trained, model):
    encode = trained.tokenizer.encode
    questions = [("def f", "(x)"), ("", "abc"), ("one ", "two"), (" ", "x"), ("d", "e")]
    pieces = [
        (encode("def f").ids, encode("(x)").ids),
        ([0], encode("abc").ids),
        (encode("one").ids, encode(" two").ids),  # " t" is a token
        ([0], encode(" x").ids),
        (encode("de").ids, []),  # the text is in the token of the context
    ]
    expected = scoring.build(trained, global_batch_size=4).score(pieces)

    found = model.loglikelihood(questions)

    assert [score for score, _ in found] == pytest.approx(
        [score.log_prob for score in expected], rel=1e-5
    )
    assert [is_greedy for _, is_greedy in found] == [s.is_greedy for s in expected]
    assert found[0][0] < 0


def test_text_longer_than_the_model_is_scored_whole(trained, model):
    text = "for i in range(10): print(i)\n" * 4
    tokens = trained.tokenizer.encode(text).ids
    assert len(tokens) > 48
    [score] = model.loglikelihood_rolling([text])
    [expected] = model.scorer.score_texts([tokens], 0)
    assert score == expected < -100


def test_context_is_continued_until_a_string(trained, model):
    table = stopping.build_table([0], (), {}, num_tokens=260)
    config = GenerationConfig(max_new_tokens=6)
    contexts = ["def f", "", "x" * 60]
    prompts = [trained.tokenizer.encode("def f").ids, [0], [*b"x" * 42]]
    prompts[2] = trained.tokenizer.encode("x" * 42).ids
    generator = generation.build(trained, config, table)
    whole = [
        trained.tokenizer.decode(list(text.tokens))
        for (text,) in generator.generate(prompts)
    ]

    how = {"until": [], "max_gen_toks": 6, "do_sample": False, "temperature": 0.0}
    questions = [(context, how) for context in contexts]
    assert model.generate_until(questions) == whole

    stop = next(letter for letter in whole[0][1:] if letter != "\ufffd")
    ends = {**how, "until": stop}
    found = model.generate_until([questions[1], (contexts[0], ends), questions[2]])
    assert found == [whole[1], whole[0][: whole[0].index(stop)], whole[2]]


def test_what_cannot_be_answered_is_an_error(trained, model, tmp_path):
    with pytest.raises(ValueError, match="is asked for with num_beams, but what can"):
        model.generate_until([("x", {"num_beams": 4})])
    with pytest.raises(ValueError, match="max_gen_toks=48 leaves no position of model"):
        model.generate_until([("x", {"max_gen_toks": 48})])
    fields = {"do_sample": True, "top_p": 2.0, "max_gen_toks": 4}
    with pytest.raises(ValueError, match=r"top_p=2.0 must be above 0"):
        model.generate_until([("x", fields)])
    trained_runs.make(tmp_path)
    with pytest.raises(
        ValueError, match="has no tokenizer, without which texts are of"
    ):
        answers.build(open_trained(str(tmp_path)))
