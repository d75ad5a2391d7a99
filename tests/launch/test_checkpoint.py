import os
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import optax
import pytest

from launch.checkpoint import Checkpointer, CheckpointError
from launch.state import TrainState
from tests.launch.checkpoint_states import (
    EXTRA,
    LAYOUTS,
    abstract,
    assert_same_bits,
    make_shardings,
    make_state,
    save_steps,
)


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_state_survives_any_change_of_layout_bit_for_bit(tmp_path, source, target):
    state = make_state(source)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(3, state, extra=EXTRA)
    wanted = abstract(make_state(target))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        restored = checkpointer.restore(wanted)
        assert checkpointer.read_extra() == EXTRA
    assert_same_bits(restored, state)
    for name, sharding in make_shardings(target).items():
        assert restored[name].sharding == sharding


def test_train_state_keeps_its_structure(tmp_path):
    params = {"blocks": {"kernel": jnp.ones((2, 4, 4)), "bias": jnp.zeros((2, 4))}}
    opt_state = optax.adamw(1e-3).init(params)
    state = TrainState(step=jnp.int32(1), params=params, opt_state=opt_state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, extra={})
        assert_same_bits(checkpointer.restore(abstract(state)), state)


def test_donating_the_state_after_save_does_not_change_what_is_saved(tmp_path):
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {f"w{i}": jnp.full((512, 1024), float(i)) for i in range(8)}
    wanted = abstract(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, extra={})
        for _ in range(10):
            state = update(state)
        restored = checkpointer.restore(wanted)
    assert [float(restored[f"w{i}"].min()) for i in range(8)] == list(range(8))
    assert [float(restored[f"w{i}"].max()) for i in range(8)] == list(range(8))


def test_nothing_exists_before_the_first_save(tmp_path):
    with Checkpointer(tmp_path / "a" / "b") as checkpointer:
        assert checkpointer.latest_step() is None
        assert checkpointer.best_step() is None
        assert checkpointer.steps() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "losses", "kept"),
    [
        ("min", [None, 3.0, 1.0, None, 2.0, 5.0], [2, 4, 5]),
        ("max", [None, 3.0, 1.0, None, 2.0, 2.0], [1, 4, 5]),
        ("min", [float("nan"), 2.0, None, None, None, None], [1, 4, 5]),
        ("min", [None] * 6, [4, 5]),
    ],
    ids=["min", "max", "nan_is_worst", "no_metrics"],
)
def test_newest_and_best_are_kept(tmp_path, mode, losses, kept):
    with Checkpointer(tmp_path, keep=2, best_mode=mode) as checkpointer:
        for step, loss in enumerate(losses):
            metrics = None if loss is None else {"loss": loss}
            checkpointer.save(step, {"x": jnp.ones(2)}, extra={}, metrics=metrics)
    with Checkpointer(tmp_path, keep=2, best_mode=mode) as checkpointer:
        assert checkpointer.steps() == kept
        assert checkpointer.best_step() == (kept[0] if len(kept) == 3 else None)


def test_a_step_that_is_saved_is_left_as_it_is(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, make_state(seed=1), extra={"first": True})
        checkpointer.save(1, make_state(seed=2), extra={"first": False})
        assert checkpointer.read_extra(1) == {"first": True}


def test_reading_leaves_a_save_in_progress_alone(tmp_path):
    save_steps(tmp_path, [1])
    in_progress = tmp_path / "2.orbax-checkpoint-tmp"
    in_progress.mkdir()
    with Checkpointer(tmp_path) as reader:
        assert reader.latest_step() == 1
        reader.restore(abstract(make_state()))
    assert in_progress.exists()
    save_steps(tmp_path, [3])
    assert not in_progress.exists()


def test_a_killed_save_never_becomes_the_latest(tmp_path):
    run_until_line(
        f"""
        with Checkpointer({str(tmp_path)!r}) as checkpointer:
            small = {{"x": jnp.ones(2)}}
            checkpointer.save(1, small, extra={{}})
            checkpointer.wait()
            big = {{f"w{{i}}": jnp.ones((1024, 1024)) for i in range(64)}}
            checkpointer.save(2, big, extra={{}})
            print("saving", flush=True)
            checkpointer.wait()
        """,
        "saving",
    )
    left = sorted(path.name for path in tmp_path.iterdir())
    with Checkpointer(tmp_path) as checkpointer:
        # Killed in the middle, unless the disk is faster than the signal.
        assert checkpointer.latest_step() == (2 if left == ["1", "2"] else 1), left
        checkpointer.restore(abstract({"x": jnp.ones(2)}), step=1)
        checkpointer.save(3, {"x": jnp.ones(2)}, extra={})
    assert all(path.name.isdigit() for path in tmp_path.iterdir())


def run_until_line(body, line):
    """Runs the code in a new process and kills it once it has printed the line."""
    code = "import jax.numpy as jnp\nfrom launch.checkpoint import Checkpointer\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    with process:
        while process.stdout.readline().strip() != line:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)


def test_failed_write_is_reported_once_and_leaves_the_earlier_checkpoint(
    tmp_path, capfd, file_size_limit
):
    state = make_state(seed=1)
    big = {"w": jnp.ones((1024, 1024))}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, extra=EXTRA)
        checkpointer.wait()
        with file_size_limit(100_000):
            checkpointer.save(2, big, extra={})
            with pytest.raises(CheckpointError) as caught:
                checkpointer.wait()
        assert str(caught.value) == (
            f"Saving the checkpoint of step 2 in '{tmp_path}' failed: File too large.\n"
            "Complete checkpoints stay loadable, the latest is step 1; what was "
            "half-written is removed.\n"
            "Make the directory writable and free some space, or use another one."
        )
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        assert_same_bits(checkpointer.restore(abstract(state)), state)
        checkpointer.save(3, state, extra=EXTRA)  # there is space again
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3]
    assert capfd.readouterr().err == ""


def test_failed_write_surfaces_at_the_next_save(tmp_path, file_size_limit):
    big = {"w": jnp.ones((1024, 1024))}
    with Checkpointer(tmp_path) as checkpointer, file_size_limit(100_000):
        checkpointer.save(1, big, extra={})
        time.sleep(0.1)
        with pytest.raises(CheckpointError, match=r"step 1 (.|\n)* there are none"):
            checkpointer.save(2, {"w": jnp.ones(2)}, extra={})


def test_full_disk_names_the_reason(tmp_path):
    small_disk = tmp_path / "disk"
    small_disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small_disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs rights; the file size limit tests the same path")
    try:
        with Checkpointer(small_disk / "checkpoints") as checkpointer:
            checkpointer.save(1, make_state(), extra=EXTRA)
            checkpointer.save(2, {"w": jnp.ones((1024, 1024))}, extra={})
            with pytest.raises(CheckpointError, match="No space left on device"):
                checkpointer.wait()
            assert checkpointer.steps() == [1]
            assert_same_bits(checkpointer.restore(abstract(make_state())), make_state())
    finally:
        subprocess.run(["umount", str(small_disk)], check=True)


def test_unwritable_directory_names_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError, match="step 1 .* Not a directory"):
        checkpointer.save(1, make_state(), extra=EXTRA)


def test_extra_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with Checkpointer(tmp_path / "a") as checkpointer:
        with pytest.raises(TypeError, match=r"must be JSON .* \{'x': \{1\}\}"):
            checkpointer.save(1, make_state(), extra={"x": {1}})
    assert not (tmp_path / "a").exists()
