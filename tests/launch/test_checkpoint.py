import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from launch import checksum
from launch.checkpoint import Checkpointer, CheckpointError
from launch.state import TrainState

# A row says how w is cut; on the axes that a layout does not have, nothing is.
LAYOUTS = {
    "one_device": ((1, 1), AxisType.Auto),
    "dp2_tp2": ((2, 2), AxisType.Auto),
    "dp4": ((4, 1), AxisType.Auto),
    "tp4_explicit": ((1, 4), AxisType.Explicit),
}
SPECS = {
    "w": P(None, "tensor"),
    "zero": P("data", "tensor"),
    "half": P("tensor"),
    "count": P(),
    "flags": P("data"),
}
EXTRA = {"config": {"seed": 1}, "next_sample": 96}


def make_arrays(seed=0):
    rng = np.random.default_rng(seed)
    # Orbax keeps arrays below 1 kB in its index, so one is larger.
    return {
        "w": rng.standard_normal((64, 48), np.float32),
        "zero": rng.standard_normal((4, 4), np.float32),
        "half": np.asarray(jnp.asarray(rng.standard_normal(8), jnp.bfloat16)),
        "count": np.int32(seed + 7),
        "flags": np.arange(8) % 3 == 0,
    }


def make_state(layout="one_device", seed=0):
    return jax.tree.map(
        lambda array, sharding: jax.device_put(array, sharding),
        make_arrays(seed),
        make_shardings(layout),
    )


def make_shardings(layout):
    shape, axis_type = LAYOUTS[layout]
    devices = jax.devices()[-shape[0] * shape[1] :]
    mesh = jax.make_mesh(
        shape, ("data", "tensor"), axis_types=(axis_type,) * 2, devices=devices
    )
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_steps(directory, steps, **options):
    with Checkpointer(directory, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(seed=step), extra=EXTRA)


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


def damage(path, how):
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    if how == "deleted":
        path.unlink()
    elif how == "flipped":
        data[middle] ^= 0x10
        path.write_bytes(data)
    else:
        path.write_bytes(data[: {"truncated": middle, "empty": 0}[how]])


def largest_data_file(step):
    files = (step / "state" / "ocdbt.process_0" / "d").iterdir()
    return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("how", ["deleted", "truncated", "empty", "flipped"])
@pytest.mark.parametrize(
    "name", ["data", "state/manifest.ocdbt", "state/_METADATA", "checksums/metadata"]
)
def test_damage_is_noticed_and_the_remedy_named(tmp_path, capfd, name, how):
    save_steps(tmp_path, [1, 2])
    step = tmp_path / "2"
    path = largest_data_file(step) if name == "data" else step / name
    damage(path, how)
    with Checkpointer(tmp_path) as checkpointer:
        wanted = abstract(make_state())
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(wanted)
        assert str(caught.value).startswith(f"'{step}' is damaged")
        assert "remove it to resume from step 1." in str(caught.value)
        assert len(str(caught.value)) < 600
        assert_same_bits(checkpointer.restore(wanted, step=1), make_state(seed=1))
    assert capfd.readouterr().err == ""


def test_flipped_value_is_named(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones((64, 64))}, extra={})
    damage(largest_data_file(tmp_path / "1"), "flipped")
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="values of w changed on disk"):
            checkpointer.restore(abstract({"w": jnp.ones((64, 64))}))


def test_damaged_extra_is_reported(tmp_path):
    save_steps(tmp_path, [1])
    damage(tmp_path / "1" / "extra" / "metadata", "truncated")
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="is damaged .*\n.* or remove it.$"):
            checkpointer.read_extra()


def test_foreign_step_directory_is_reported(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "model.bin").write_text("x")
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="7' is damaged or was not written"):
            checkpointer.restore(abstract(make_state()))


@pytest.mark.parametrize("read", ["restore", "read_extra"])
def test_absence_is_described(tmp_path, read):
    arguments = [abstract(make_state())] if read == "restore" else []

    def fail(directory):
        with Checkpointer(directory) as checkpointer:
            with pytest.raises(CheckpointError) as caught:
                getattr(checkpointer, read)(*arguments)
        return str(caught.value)

    assert fail(tmp_path / "x").startswith("There is no checkpoint directory")
    assert fail(tmp_path).endswith("such as '100'; it holds nothing.")
    (tmp_path / "notes.txt").write_text("")
    assert fail(tmp_path).endswith("such as '100'; it holds notes.txt.")
    assert fail(tmp_path / "notes.txt").endswith(
        "is a file, not a checkpoint directory."
    )


def test_missing_step_lists_those_there_are(tmp_path):
    save_steps(tmp_path, [1, 2])
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(
            CheckpointError, match="no checkpoint of step 5. It has 1, 2"
        ):
            checkpointer.read_extra(5)


def test_every_difference_to_the_run_is_listed(tmp_path):
    block = {"kernel": jnp.ones((4, 4)), "bias": jnp.zeros(4)}
    saved = {"blocks": [block] * 4, "step": jnp.int32(1), "old": jnp.ones(3)}
    wider = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(4)}
    wanted = {"blocks": [wider] * 3, "step": jnp.float32(1), "new": jnp.ones(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved, extra={})
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(abstract(wanted))
    first, *lines, last = str(caught.value).splitlines()
    assert first == (
        f"The checkpoint of step 1 in '{tmp_path}' is of another model or optimizer:"
    )
    assert sorted(lines) == [
        "  blocks/*/bias: float32[4] in the checkpoint, not in this run.",
        "  blocks/*/kernel: float32[4,4] in the checkpoint, "
        "float32[4,8] in this run (3 arrays).",
        "  blocks/*/kernel: float32[4,4] in the checkpoint, not in this run.",
        "  new: float32[2] in this run, not in the checkpoint.",
        "  old: float32[3] in the checkpoint, not in this run.",
        "  step: int32[] in the checkpoint, float32[] in this run.",
    ]
    assert last == "Use the config it was saved with, or another directory."


def test_long_lists_of_differences_fit_a_screen(tmp_path):
    saved = {f"old{i:02}": jnp.ones(()) for i in range(40)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved, extra={})
        with pytest.raises(CheckpointError, match="  ... and 24 more.\n"):
            checkpointer.restore({})


def test_abstract_state_without_sharding_is_named(tmp_path):
    save_steps(tmp_path, [1])
    wanted = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match="have no sharding: w. Use"):
            checkpointer.restore(wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep=0 would keep no checkpoint"),
        ({"best_mode": "lowest"}, "best_mode='lowest' must be 'min' or 'max'"),
    ],
    ids=["keep", "best_mode"],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checksums_do_not_depend_on_the_layout(layout):
    arrays = make_arrays()
    expected = [
        int(array.view(f"uint{8 * array.itemsize}").sum(dtype=np.uint64)) % 2**32
        for array in jax.tree.leaves(arrays)
    ]
    assert checksum.checksums(jax.tree.leaves(make_state(layout))) == expected


def test_directory_holds_plain_json(tmp_path):
    save_steps(tmp_path, [1])
    extra = pathlib.Path(tmp_path, "1", "extra", "metadata")
    assert json.loads(extra.read_text()) == EXTRA
