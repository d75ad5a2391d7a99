"""lm-evaluation-harness reports what the model itself says of a task."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from launch import answers, lm_eval
from launch.trained import open_trained
from tests.launch import trained_runs

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
{rest}
"""
TASKS = {
    "toy_choice": (
        "multiple_choice",
        'doc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{label}}"\nmetric_list:\n  - metric: acc\n',
    ),
    "toy_rolling": (
        "loglikelihood_rolling",
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n  - metric: bits_per_byte\n",
    ),
    "toy_until": (
        "generate_until",
        'doc_to_text: "{{context}}"\ndoc_to_target: "{{text}}"\n'
        'generation_kwargs:\n  until: ["q"]\n  max_gen_toks: 5\n  do_sample: false\n'
        "metric_list:\n  - metric: exact_match\n",
    ),
}
CONTEXTS = ["def f", "import x as", "for i in", "a b c d"]
CHOICES = [" x", "(", " y:", "zz"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a GPT-2."""
    directory = tmp_path_factory.mktemp("gpt2")
    trained_runs.make(directory, tokenizer=trained_runs.byte_tokenizer())
    return str(directory)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm_eval"
)
def test_tasks_of_the_harness_score_what_the_model_says(run, tmp_path):
    model = answers.build(open_trained(run))
    how = {"until": ["q"], "max_gen_toks": 5}
    written = model.generate_until([(context, how) for context in CONTEXTS])
    written[-1] += "not this"
    docs = [
        {"context": c, "choices": CHOICES, "label": i, "text": text}
        for i, (c, text) in enumerate(zip(CONTEXTS, written, strict=True))
    ]
    file = tmp_path / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, (kind, rest) in TASKS.items():
        text = TASK.format(name=name, file=file, kind=kind, rest=rest)
        (tmp_path / f"{name}.yaml").write_text(text)

    output = tmp_path / "results.json"
    command = [sys.executable, "-m", "launch.lm_eval", f"--workdir={run}"]
    command += [f"--tasks={','.join(TASKS)}", f"--include_path={tmp_path}"]
    command += [f"--output={output}", "--tensor_parallel_size=2"]
    offline = {"HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, check=True, env={**os.environ, **offline})

    found = json.loads(output.read_text())
    questions = [(context, f" {choice}") for context in CONTEXTS for choice in CHOICES]
    scores = [score for score, _ in model.loglikelihood(questions)]
    best = [
        max(range(4), key=lambda j, i=i: scores[4 * i + j]) for i in range(len(docs))
    ]
    right = sum(j == i for i, j in enumerate(best)) / 4
    assert found["toy_choice"]["acc,none"] == right
    total = sum(model.loglikelihood_rolling(written))
    num_bytes = sum(len(text.encode()) for text in written)
    bits = -total / num_bytes / math.log(2)
    assert found["toy_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)
    assert found["toy_until"]["exact_match,none"] == 0.75


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--limit=0", "--limit=0 must be at least 1."),
        ("--num_fewshot=-1", "--num_fewshot=-1 must be at least 0."),
        ("--include_path=none", "--include_path=none is no folder. Name one of task"),
    ],
)
def test_flag_that_asks_for_nothing_is_an_error(flag, message, capsys):
    with pytest.raises(SystemExit):
        lm_eval.main(["--workdir=w", "--tasks=x", flag])
    assert message in capsys.readouterr().err


def test_missing_workdir_is_an_error_before_tasks_are_looked_for(tmp_path, capsys):
    assert lm_eval.main([f"--workdir={tmp_path}", "--tasks=x"]) == 1
    assert "holds no config.yaml. Name the workdir" in capsys.readouterr().err


def test_missing_package_is_an_error(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert lm_eval.main([f"--workdir={run}", "--tasks=x"]) == 1
    expected = "lm-evaluation-harness is not installed. Run pip install -e '.[lm_eval]'"
    assert expected in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm_eval"
)
def test_unknown_task_is_an_error(run):
    command = [sys.executable, "-m", "launch.lm_eval", f"--workdir={run}"]
    done = subprocess.run(
        [*command, "--tasks=hellaswag,helaswag"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "there is no task helaswag. Name one of lm-eval" in done.stderr
