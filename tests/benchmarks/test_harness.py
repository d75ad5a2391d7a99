import argparse
import json
import time

import jax.numpy as jnp
import pytest

from benchmarks import harness
from benchmarks.harness import Timing


def test_spread_is_of_the_quartiles_and_ignores_outliers():
    timing = Timing((1.0, 2.0, 2.0, 2.0, 3.0, 100.0, 2.0))
    assert timing.median == 2.0
    assert timing.quartiles == (2.0, 2.5)
    assert timing.spread == 0.25
    assert timing.to_json("step") == {
        "step_seconds_median": 2.0,
        "step_seconds_quartile_low": 2.0,
        "step_seconds_quartile_high": 2.5,
        "step_num_runs": 7,
    }


def test_a_single_run_has_no_spread():
    assert Timing((2.0,)).quartiles == (2.0, 2.0)


def test_works_take_turns_and_the_warm_up_does_not_count():
    calls = []

    def make_work(name, seconds):
        def work():
            calls.append(name)
            time.sleep(seconds)
            return jnp.ones(())

        return work

    works = {"fast": make_work("fast", 0.0), "slow": make_work("slow", 0.02)}
    timings = harness.time_in_turns(works, num_warmup=2, num_runs=3)
    assert calls == ["fast"] * 2 + ["slow"] * 2 + ["fast", "slow"] * 3
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]
    assert timings["slow"].median == pytest.approx(0.02, rel=0.5)
    assert timings["slow"].median > timings["fast"].median


def test_of_several_runs_in_a_turn_the_last_counts():
    calls = []

    def work():
        calls.append(None)
        is_last_of_turn = len(calls) % 2 == 0
        time.sleep(0.0 if is_last_of_turn else 0.05)
        return jnp.ones(())

    timings = harness.time_in_turns(
        {"work": work}, num_warmup=0, num_runs=3, runs_per_turn=2
    )
    assert len(calls) == 6
    assert len(timings["work"].seconds) == 3
    assert timings["work"].median < 0.05


def test_report_ends_with_one_line_of_json(capsys):
    harness.report({"step": "1 ms"}, {"step_seconds_median": 0.001}, title="a model")
    *table, line = capsys.readouterr().out.splitlines()
    assert any("step" in row and "1 ms" in row for row in table)
    record = json.loads(line)
    assert record["step_seconds_median"] == 0.001
    assert record["machine"]["num_devices"] == 8
    assert record["machine"].keys() >= {"date", "command", "device_kind", "jax"}


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_count_of_runs_is_a_positive_whole_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a whole"):
        harness.positive(text)
