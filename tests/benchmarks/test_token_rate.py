import json

import pytest

from benchmarks import token_rate

SIZES = "num_layers=1 model_dim=16 mlp_dim=32 num_heads=2 vocab_size=64 max_len=32"
ARGUMENTS = [
    "--config=configs/gpt2_tiny.py",
    *(f"--config.model.{field}" for field in SIZES.split()),
    "--config.data.seq_length=16",
    "--config.dist.data_parallel_size=8",
    "--num_texts=8",
]


def test_record_says_what_was_measured(capsys):
    fields = ["--num_runs=3", "--prompt_length=4", "--max_new_tokens=6"]
    token_rate.main([*ARGUMENTS, *fields])
    *table, line = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["layout"] == "dp8_tp1_pp1"
    assert record["cached_num_runs"] == record["recomputing_num_runs"] == 3
    cached = record["cached_seconds_median"]
    assert record["cached_tokens_per_second"] == pytest.approx(8 * 6 / cached)
    ratio = record["recomputing_seconds_median"] / cached
    assert record["recomputing_over_cached"] == pytest.approx(ratio)
    assert any("recomputing / cached" in row for row in table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=nowhere.py"], "--config=nowhere.py: there is no such file"),
        ([*ARGUMENTS, "--max_new_tokens=0"], "'0' is not a whole number"),
        ([*ARGUMENTS, "--cofnig.model.x=1"], "expected --config.SECTION.FIELD=VALUE"),
        (
            [*ARGUMENTS, "--prompt_length=20", "--max_new_tokens=20"],
            "prompt_length=20 and max_new_tokens=20 are more than model.max_len=32.",
        ),
        (
            ["--config=configs/bert_tiny.py", "--config.dist.data_parallel_size=8"],
            "model.name='bert' does not continue texts.",
        ),
    ],
)
def test_wrong_command_names_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit):
        token_rate.main(arguments)
    assert message in capsys.readouterr().err
