"""A sweep runs every case once, survives failures, and goes on where it stopped."""

import json

import pytest

from benchmarks import sweep, sweep_report
from benchmarks.sweep_cases import load_matrix

MATRIX = """
config: configs/bert_tiny.py
fields:
  model.model_dim: 16
  model.num_heads: 2
  model.mlp_dim: 32
  model.vocab_size: 64
  data.seq_length: 16
cases:
  - nl2_fp32_1x1x1_mb2_gb4_1n1g
  - name: nl2_fp32_1x1x2_ac_mb2_gb4_1n2g
    label: too_few_heads
    fields: {model.num_heads: 3}
  - name: nl2_bf16_2x1x2_ac_mb1_gb4_1n4g
    label: gpipe
    fields: {dist.pipeline_schedule: gpipe}
  - nl2_fp32_4x1x1_mb1_gb4_2n2g
"""
FIRST, FAILING, PIPELINED, TWO_HOSTS = (
    "nl2_fp32_1x1x1_mb2_gb4_1n1g",
    "nl2_fp32_1x1x2_ac_mb2_gb4_1n2g-too_few_heads",
    "nl2_bf16_2x1x2_ac_mb1_gb4_1n4g-gpipe",
    "nl2_fp32_4x1x1_mb1_gb4_2n2g",
)


@pytest.fixture
def matrix(tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_text(MATRIX)
    return path


def test_names_say_the_fields(matrix):
    first, _, pipelined, _ = load_matrix(str(matrix))
    assert first.key == FIRST
    assert pipelined.key == PIPELINED
    assert first.overrides["remat"] == "none"
    assert first.overrides["model.model_dim"] == 16
    expected = {
        "model.num_layers": 2,
        "model.dtype": "bfloat16",
        "dist.data_parallel_size": 2,
        "dist.tensor_parallel_size": 1,
        "dist.pipeline_parallel_size": 2,
        "dist.pipeline_schedule": "gpipe",
        "remat": "full",
        "train.global_batch_size": 4,
        "train.num_microbatches": 2,
    }
    assert pipelined.overrides.items() >= expected.items()
    assert pipelined.num_devices == 4


def test_names_that_break_rules_are_listed_before_anything_runs(tmp_path, capsys):
    path = tmp_path / "matrix.yaml"
    names = [
        "nl2_fp32_1x1x1",
        "nl2_fp32_2x2x1_mb1_gb4_1n2g",
        "nl2_fp32_2x1x1_mb4_gb4_1n2g",
        "nl2_fp32_1x1x1_mb4_gb4_1n1g",
        "nl2_fp32_1x1x1_mb4_gb4_1n1g",
    ]
    path.write_text(json.dumps({"cases": names}))
    code = sweep.main([f"--matrix={path}", f"--workdir={tmp_path / 'out'}"])
    error = capsys.readouterr().err
    assert code == 2
    assert "breaks 4 rules" in error
    assert "nl2_fp32_1x1x1: not a name of the form nl24_fp32_2x2x2_ac_mb4" in error
    assert "2x2x1 is 4 devices, but 1n2g is 2. Make them equal." in error
    assert "gb4 is not divisible by mb4 x 2 data-parallel ranks." in error
    assert "there are 2 cases of this name. Give each a 'label'." in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ("cases: [", "while parsing a flow"),
        ("- a", "it is not a mapping with a list of 'cases'"),
    ],
)
def test_file_that_is_no_matrix_is_refused(tmp_path, text, message):
    path = tmp_path / "matrix.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_matrix(str(path))


@pytest.mark.slow
def test_sweep_records_failures_and_goes_on_where_it_stopped(matrix, tmp_path, capsys):
    workdir = tmp_path / "out"
    arguments = [f"--matrix={matrix}", f"--workdir={workdir}", "--num_runs=2"]
    assert sweep.main(arguments) == 1
    records = sweep.read_records(workdir / "results.jsonl")
    assert list(records) == [FIRST, FAILING, PIPELINED, TWO_HOSTS]
    assert {records[FIRST]["status"], records[PIPELINED]["status"]} == {"ok"}
    assert "model_dim=16 is not divisible by num_heads=3" in records[FAILING]["error"]
    assert "is for 2 hosts" in records[TWO_HOSTS]["error"]
    result = records[PIPELINED]
    assert result["machine"]["num_devices"] == 4
    seconds = result["step_seconds_median"]
    assert result["samples_per_second"] == pytest.approx(4 / seconds)
    assert result["tokens_per_second"] == pytest.approx(4 * 16 / seconds)

    table = (workdir / "results.md").read_text()
    assert f"| {FIRST} | 1 |" in table
    assert f"| {FAILING} | 2 | failed |" in table
    assert (workdir / "results.png").read_bytes().startswith(b"\x89PNG")

    # The last line was cut short, as by a full disk: that case is tried again too.
    lines = (workdir / "results.jsonl").read_text().splitlines()
    (workdir / "results.jsonl").write_text("\n".join([*lines[:2], lines[2][:40]]))
    capsys.readouterr()
    assert sweep.main(arguments) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"1/4 {FIRST}: done before"
    assert printed[1].startswith(f"2/4 {FAILING}: failed. Exit code 1. The run")
    assert printed[2].startswith(f"3/4 {PIPELINED}: ")
    assert "samples/s" in printed[2]
    records = sweep.read_records(workdir / "results.jsonl")
    assert [r["status"] for r in records.values()] == ["ok", "failed", "ok", "failed"]


def test_case_that_takes_too_long_is_given_up(matrix, tmp_path):
    case = load_matrix(str(matrix))[0]
    record = sweep.run(case, sweep.describe(case, 1), timeout_seconds=0.01)
    assert record["error"] == "It took longer than --timeout_seconds=0.01."


def test_crash_is_recorded_with_what_was_said_before_the_stack():
    stderr = "I0 fine\nF1129 a.cc:1] Check failed: x\n*** stack ***\n    @ 0x1 f()\n"
    assert sweep._last_words(stderr) == "I0 fine\nF1129 a.cc:1] Check failed: x"


def make_record(case, num_devices, samples_per_second, group="a"):
    return {
        "case": case,
        "group": group,
        "num_devices": num_devices,
        "status": "ok",
        "samples_per_second": samples_per_second,
    }


def test_scaling_is_relative_to_the_fewest_devices_of_the_group():
    records = [
        make_record("four", 4, 30.0),
        make_record("one", 1, 10.0),
        make_record("other", 2, 50.0, group="b"),
        {"case": "failed", "group": "a", "num_devices": 8, "status": "failed"},
    ]
    scaling = sweep_report.scale(records)
    assert scaling == {"four": 0.75, "one": 1.0, "other": 1.0}


def test_process_sees_as_many_gpus_as_its_case_asks_for():
    assert sweep.visible_devices({}, 2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    given = {"CUDA_VISIBLE_DEVICES": "7,3,1", "X": "y"}
    assert sweep.visible_devices(given, 2) == {"CUDA_VISIBLE_DEVICES": "7,3", "X": "y"}
