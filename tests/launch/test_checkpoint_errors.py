import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import checksum
from launch.checkpoint import Checkpointer, CheckpointError
from tests.launch.checkpoint_states import (
    EXTRA,
    LAYOUTS,
    abstract,
    assert_same_bits,
    make_arrays,
    make_state,
    save_steps,
)


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
