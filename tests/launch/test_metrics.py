import contextlib
import json
import struct

import jax
import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from launch.hardware import Peak
from launch.metrics import MetricLogger, StepCost, StepTimer, read_metrics


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def read_events(workdir):
    """Parses event files: length, its checksum, the event, its checksum."""
    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def read_scalars(workdir):
    return [
        (event.step, value.tag, value.simple_value)
        for event in read_events(workdir)
        for value in event.summary.value
    ]


def test_each_logged_step_is_one_json_object(tmp_path):
    with MetricLogger(tmp_path, num_steps=20) as logger:
        logger.write(10, {"loss": jnp.float32(1.5), "peak_memory_bytes": 7})
        logger.write_eval(10, {"loss": jnp.float32(2.5)})
        logger.write(20, {"loss": 0.5, "grad_norm": jnp.bfloat16(0.25)})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == [
        '{"step": 10, "loss": 1.5, "peak_memory_bytes": 7}',
        '{"step": 10, "eval_loss": 2.5}',
        '{"step": 20, "loss": 0.5, "grad_norm": 0.25}',
    ]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    with MetricLogger(tmp_path, num_steps=20) as logger:
        logger.write(10, {"loss": 1.5, "grad_norm": 2.0})
        logger.write_eval(10, {"loss": 2.5})
    assert read_scalars(tmp_path) == [
        (10, "train/loss", 1.5),
        (10, "train/grad_norm", 2.0),
        (10, "eval/loss", 2.5),
    ]


def test_lines_are_on_disk_at_once(tmp_path):
    with MetricLogger(tmp_path, num_steps=20) as logger:
        logger.write(10, {"loss": 1.5})
        assert read_metrics(logger.path) == [{"step": 10, "loss": 1.5}]
        assert read_scalars(tmp_path) == [(10, "train/loss", 1.5)]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with MetricLogger(tmp_path, num_steps=1) as logger:
        logger.write(1, {"loss": jnp.float32("nan"), "grad_norm": jnp.float32("inf")})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert line == '{"step": 1, "loss": null, "grad_norm": null}'


def test_metrics_of_a_sharded_array_are_fetched(tmp_path, devices):
    mesh = jax.make_mesh(
        (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    loss = jax.device_put(jnp.float32(3.5), everywhere)
    with MetricLogger(tmp_path, num_steps=1) as logger:
        logger.write(1, {"loss": loss})
    assert read_metrics(logger.path) == [{"step": 1, "loss": 3.5}]


def test_resuming_drops_what_will_be_done_again(tmp_path):
    with MetricLogger(tmp_path, num_steps=30) as logger:
        for step in (10, 20, 30):
            logger.write(step, {"loss": float(step)})
            logger.write_eval(step, {"loss": step + 0.5})
    with MetricLogger(tmp_path, num_steps=30, resumed_step=20) as logger:
        logger.write(30, {"loss": -1.0})
    steps = [record["step"] for record in read_metrics(logger.path)]
    assert steps == [10, 10, 20, 20, 30]
    assert read_metrics(logger.path)[-1] == {"step": 30, "loss": -1.0}
    starts = [
        event.step
        for event in read_events(tmp_path)
        if event.session_log.status == SessionLog.START
    ]
    assert starts == [1, 21]  # TensorBoard hides what came from there on


def test_resuming_drops_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n{"step": 20, "lo')
    with MetricLogger(tmp_path, num_steps=30, resumed_step=20) as logger:
        logger.write(30, {"loss": 3.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [
        10,
        30,
    ]


def test_starting_afresh_drops_all(tmp_path):
    for loss in (1.0, 2.0):
        with MetricLogger(tmp_path, num_steps=1) as logger:
            logger.write(1, {"loss": loss})
    assert read_metrics(logger.path) == [{"step": 1, "loss": 2.0}]


def test_metrics_of_a_missing_file_are_none(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_missing_workdir_is_named(tmp_path):
    with pytest.raises(OSError, match=r"Writing the metrics failed: No such .*/x/"):
        MetricLogger(tmp_path / "x", num_steps=1)


def test_full_disk_is_reported_and_does_not_hang(tmp_path, file_size_limit):
    with pytest.raises(OSError, match="Writing the metrics failed: File too large"):
        write_without_end(tmp_path, file_size_limit(10_000))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) > 10  # those before are safe


def write_without_end(workdir, limit):
    with MetricLogger(workdir, num_steps=10_000) as logger, limit:
        for step in range(10_000):
            logger.write(step, {"loss": 1.0})


def test_lines_are_printed_where_there_is_no_terminal(tmp_path, capsys):
    with MetricLogger(tmp_path, num_steps=200) as logger:
        logger.tick(9)
        logger.write(
            10,
            {
                "loss": 6.5,
                "mlm_loss": 5.75,
                "nsp_loss": 0.75,
                "learning_rate": 1e-3,
                "grad_norm": 1.25,
                "step_seconds": 0.5,
                "tokens_per_second": 8192.0,
                "samples_per_second": 64.0,
                "model_tflops_per_second": 0.125,
                "utilization": 0.5,
                "peak_memory_bytes": 1_500_000_000,
            },
        )
        logger.write_eval(10, {"loss": 6.0, "mlm_accuracy": 0.125})
        logger.print("Saved [1].")
    assert capsys.readouterr().out == (
        "step  10/200  eta 0:01:35  loss 6.5000  mlm 5.7500  nsp 0.7500  lr 1.00e-03  "
        "grad norm 1.25  8,192 tokens/s  64.0 samples/s  0.125 TFLOP/s  50.0% of peak  "
        "1.5 GB memory\n"
        "step  10/200  evaluation  loss 6.0000  mlm accuracy 12.5%\n"
        "Saved [1].\n"
    )


def test_laps_leave_out_pauses():
    clock = FakeClock()
    timer = StepTimer(clock)
    clock.now += 5.0  # compilation
    timer.start()
    clock.now += 3.0
    with timer.paused():
        clock.now += 100.0
    clock.now += 1.0
    assert timer.lap(8) == 0.5
    clock.now += 2.0
    assert timer.lap(1) == 2.0


def test_a_pause_counts_not_even_if_it_fails():
    clock = FakeClock()
    timer = StepTimer(clock)
    with contextlib.suppress(RuntimeError), timer.paused():
        clock.now += 100.0
        raise RuntimeError
    clock.now += 1.0
    assert timer.lap(1) == 1.0


def test_timer_waits_for_the_arrays_it_is_given():
    clock = FakeClock()
    timer = StepTimer(clock)
    loss = jnp.ones(()) + 1
    with timer.paused(after=loss):
        pass
    assert timer.lap(1, after={"loss": loss}) == 0.0


def test_rates_are_those_of_all_devices():
    peak = Peak(4e12, "an example")
    cost = StepCost(num_samples=8, num_tokens=1024, model_flops=10**12, peak=peak)
    assert cost.rates(0.5) == {
        "step_seconds": 0.5,
        "tokens_per_second": 2048.0,
        "samples_per_second": 16.0,
        "model_tflops_per_second": 2.0,
        "utilization": 0.5,
    }
