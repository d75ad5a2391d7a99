"""Texts are continued the same on every layout, in any batch, from the command line."""

import dataclasses
import json
import pathlib
import re

import pytest

from launch import generate, generation
from launch.generation import Continuation, GenerationConfig
from launch.stop_rules import StopRules
from launch.trained import open_trained
from models import stopping
from models.sampling import SamplingConfig
from tests.launch import trained_runs

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "generation.md"
PROMPTS = ([1, 2, 3, 4, 5], [7], [9, 8, 7], [100] * 12, [3, 3])
TABLE = stopping.build_table(range(0, 260, 8), (), {}, num_tokens=260)
DRAWN = GenerationConfig(
    max_new_tokens=10,
    num_samples=2,
    sampling=SamplingConfig(
        temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.2
    ),
    seed=3,
)
SEARCHED = GenerationConfig(max_new_tokens=10, num_beams=3, num_samples=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a GPT-2."""
    directory = tmp_path_factory.mktemp("gpt2")
    trained_runs.make(directory, tokenizer=trained_runs.byte_tokenizer())
    return str(directory)


@pytest.fixture(scope="module")
def one_device(run):
    return open_trained(run)


@pytest.fixture(scope="module")
def four_devices(run):
    return open_trained(run, data_parallel_size=2, tensor_parallel_size=2)


@pytest.fixture(scope="module")
def drawn(one_device):
    return tokens_of(one_device, DRAWN)


def tokens_of(trained, config, prompts=PROMPTS):
    found = generation.build(trained, config, TABLE).generate(prompts)
    return [[text.tokens for text in texts] for texts in found]


def test_layout_changes_no_text_that_is_drawn(four_devices, drawn):
    assert tokens_of(four_devices, DRAWN) == drawn
    texts = {text for texts in drawn for text in texts}
    assert len(texts) == 10
    assert min(map(len, texts)) < max(map(len, texts)) == 10


def test_text_that_is_drawn_depends_on_the_seed_and_not_on_its_batch(one_device, drawn):
    fewer = dataclasses.replace(DRAWN, global_batch_size=2)
    assert tokens_of(one_device, fewer) == drawn
    other = dataclasses.replace(fewer, seed=4)
    assert tokens_of(one_device, other, PROMPTS[:1])[0][0] != drawn[0][0]


def test_layout_changes_no_text_that_is_searched(one_device, four_devices):
    expected = generation.build(one_device, SEARCHED, TABLE).generate(PROMPTS)
    found = generation.build(four_devices, SEARCHED, TABLE).generate(PROMPTS)
    for texts, wanted in zip(found, expected, strict=True):
        assert [text.tokens for text in texts] == [text.tokens for text in wanted]
        assert [t.has_ended for t in texts] == [t.tokens[-1] % 8 == 0 for t in texts]
        scores = [text.score for text in wanted]
        assert [text.score for text in texts] == pytest.approx(scores, rel=1e-5)
        assert scores == sorted(scores, reverse=True)
        assert len(texts) == 2


def compile_text(trained, config):
    """Returns the compiled program for the prompts."""
    program = generation.build_program(trained, config)
    _, batch = next(generation._batches(PROMPTS, config, trained, end=1))
    shared = {"table": TABLE, "seed": 0}
    return program.lower(trained.params, batch, shared).compile().as_text()


def test_heads_of_the_cache_are_split_over_tensor(four_devices):
    text = compile_text(four_devices, GenerationConfig(max_new_tokens=10))
    # layers, half of six texts, 16 + 10 positions, half of four heads, their size
    assert "f32[2,3,26,2,4]" in text
    assert "f32[2,3,26,4,4]" not in text
    assert "f32[2,6,26" not in text


@pytest.mark.parametrize(
    ("config", "num_prompts", "num_texts"),
    [(DRAWN, 5, 5), (SEARCHED, 3, 9)],
    ids=["drawn", "searched"],
)
def test_step_gathers_the_scores_once(four_devices, config, num_prompts, num_texts):
    text = compile_text(four_devices, config)
    moved = re.findall(r"= \w+(\[[\d,]*\])\S* (all-\w+|collective-\w+)\(", text)
    # When the prompts are read, and in the loop: one for the embedding and two for each
    # layer, which a loop over the layers has once in its body.
    assert sorted(moved) == sorted(
        [(f"[{num_prompts},16,16]", "all-reduce")] * 3
        + [(f"[{num_texts},1,16]", "all-reduce")] * 3
        + [(f"[{num_texts},260]", "all-gather")] * 2
    )


def main(run, *arguments):
    return generate.main([f"--workdir={run}", "--max_new_tokens=10", *arguments])


def test_prompts_of_a_file_are_continued_into_json_lines(run, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    texts = ["def f(", "x", "\u00e9t\u00e9"]
    lines = [json.dumps({"prompt": text}) for text in texts]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    output = tmp_path / "out.jsonl"

    code = main(
        run,
        f"--prompts={prompts}",
        f"--output={output}",
        "--prompt=first",
        "--temperature=1.5",
        "--num_samples=2",
        "--data_parallel_size=2",
    )

    assert code == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in found[::2]] == ["first", *texts]
    assert [line["sample"] for line in found] == [0, 1] * 4
    for line in found:
        assert line["ended_by"] == "stop" or line["num_tokens"] == 10
        assert len(line["text"]) >= 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 7: 8 texts of " in captured.err


def test_text_ends_before_what_it_is_to_end_at(run, tmp_path, capsys):
    tokenizer = trained_runs.byte_tokenizer()

    def text(*arguments):
        output = tmp_path / "out.jsonl"
        assert main(run, "--prompt=def main(", f"--output={output}", *arguments) == 0
        return json.loads(output.read_text())

    free = text()
    assert free["ended_by"] == "max_new_tokens"
    whole = free["text"]
    stop = next(letter for letter in whole[3:] if letter != "\ufffd")
    cut = text(f"--stop={stop}", "--stop=never")
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["ended_by"] == "stop"
    assert cut["num_tokens"] < 10

    [token] = tokenizer.encode(stop).ids
    assert text(f"--stop_token={token}") == cut


def test_line_of_a_beam_search_has_its_score(one_device):
    rules = StopRules(tokens=(0,))
    found = Continuation(tokens=(258, 0), has_ended=True, score=-1.5)
    assert generate.describe(one_device, rules, "a ", 1, found) == {
        "prompt": "a ",
        "sample": 1,
        "text": "def",
        "num_tokens": 2,
        "ended_by": "stop",
        "score": -1.5,
    }


def test_texts_are_printed_after_their_prompts(run, capsys):
    assert main(run, "--prompt=def main(") == 0
    assert capsys.readouterr().out.startswith("def main(")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt="], "Prompt 1 is empty, and there is nothing to continue."),
        (
            ["--prompt=def", f"--prompt={'y' * 40}"],
            "Prompt 2 has 40 tokens, and max_new_tokens=10 more are longer than the 48"
            " positions of model.max_len. Use max_new_tokens=8, or a shorter prompt.",
        ),
        (
            ["--prompt=x", "--temperature=1", "--top_p=1.5", "--num_samples=0"],
            "breaks 2 rules:\n  num_samples=0 must be at least 1.\n  top_p=1.5 must be"
            " above 0",
        ),
        (
            ["--prompt=x", "--temperature=1", "--num_beams=4"],
            "num_beams=4 looks for the most probable text, and temperature=1.0 draws",
        ),
        (
            ["--prompt=x", "--num_beams=2", "--num_samples=3"],
            "num_samples=3 is more than the texts that num_beams=2 finds.",
        ),
        (
            ["--prompt=x", "--num_samples=3"],
            "num_samples=3 are all the same at temperature=0",
        ),
        (
            ["--prompt=x", "--length_penalty=2"],
            "length_penalty=2.0 has no meaning without a beam search.",
        ),
        (
            ["--prompt=x", "--temperature=1", "--top_k=300"],
            "top_k=300 is more than the 260 tokens of the model.",
        ),
        (
            ["--prompt=x", "--data_parallel_size=2", "--global_batch_size=3"],
            "global_batch_size=3 is not divisible by data_parallel_size=2.",
        ),
        (["--prompt=x", "--stop="], "A stop string is empty, and every text"),
        (["--prompt=x", "--stop_token=300"], "The stop tokens [300] are none of the"),
        (["--prompt=x", "--step=3"], "has no checkpoint of step 3. It has 7."),
        (["--prompt=x", "--tensor_parallel_size=3"], "num_heads=4 is not divisible"),
        (["--prompts={tmp}/none.txt"], "none.txt cannot be read: No such file"),
        (["--prompts={tmp}/empty.txt"], "has no line. Write one prompt per line."),
        (
            ["--prompts={tmp}/bad.jsonl"],
            "bad.jsonl, line 2: '{\"text\": 1}' is not a JSON object with a text under",
        ),
        (["--prompt=x", "--output={tmp}/no/out"], "there is no folder '{tmp}/no'."),
        (["--prompt=x", "--output={tmp}"], "--output={tmp} is a folder. Name a file"),
    ],
)
def test_what_cannot_be_done_is_an_error(run, arguments, message, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": 1}\n')
    places = {"tmp": str(tmp_path)}

    code = main(run, *(argument.format(**places) for argument in arguments))

    assert code == 1
    expected = message.replace("{tmp}", str(tmp_path))
    assert expected in capsys.readouterr().err


def test_model_that_does_not_continue_texts_is_an_error():
    expected = "model.name='bert' does not continue texts. Use the workdir of a gpt2."
    with pytest.raises(ValueError, match=re.escape(expected)):
        generation.check_family("bert")


def test_workdir_without_checkpoint_or_tokenizer_is_an_error(tmp_path, capsys):
    assert main(tmp_path, "--prompt=x") == 1
    assert "holds no config.yaml. Name the workdir" in capsys.readouterr().err
    trained_runs.make(tmp_path)
    assert main(tmp_path, "--prompt=x") == 1
    assert "has no tokenizer, without which texts are of no" in capsys.readouterr().err


def test_blank_lines_of_a_file_are_no_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone\n\n two\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n\n{"prompt": " two"}\n')

    for name in ("a.txt", "a.jsonl"):
        assert generate.read_prompts(str(tmp_path / name)) == ["one", " two"]


def test_no_prompt_is_an_error(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--workdir=w"])
    assert "there is nothing to continue. Add --prompt=TEXT" in capsys.readouterr().err


def test_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    run = tmp_path / "runs" / "gpt2_tiny"
    trained_runs.make(run, tokenizer=trained_runs.byte_tokenizer())
    monkeypatch.chdir(tmp_path)

    names = {}
    exec(compile(code, str(PAGE), "exec"), names)

    last = names["texts"][0]
    assert len(last.tokens) == 20
    text = names["rules"].text_of(names["trained"].tokenizer, last.tokens)
    assert capsys.readouterr().out.endswith(f"{text}\n")
