"""A model is what it was in its run, on whatever layout it is used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from launch import step, workdir
from launch.checkpoint import CheckpointError
from launch.resolve import ConfigError
from launch.trained import open_trained
from tests.launch import trained_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A workdir and the state saved in it."""
    directory = tmp_path_factory.mktemp("run")
    tokenizer = trained_runs.byte_tokenizer()
    return directory, trained_runs.make(directory, tokenizer=tokenizer)


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 2), (1, 4)])
def test_parameters_are_those_saved_on_any_layout(run, data, tensor):
    directory, state = run

    trained = open_trained(
        str(directory), data_parallel_size=data, tensor_parallel_size=tensor
    )

    assert trained.step == 7
    sizes = trained.mesh.shape["data"], trained.mesh.shape["tensor"], trained.mesh.size
    assert sizes == (data, tensor, data * tensor)
    assert trained.tokenizer.decode([258]) == "def"
    jax.tree.map(np.testing.assert_array_equal, trained.params, state.params)
    kernel = trained.params["blocks"]["attention"]["qkv"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 16, 3, 4 // tensor, 4)


def test_outputs_are_the_same_on_any_layout_and_of_any_batch_size(run):
    tokens = np.random.default_rng(0).integers(0, 260, (4, 5), np.int32)
    found = []
    for data, rows in ((1, tokens[:3]), (2, tokens)):
        trained = open_trained(
            str(run[0]), data_parallel_size=data, tensor_parallel_size=data
        )
        program = step.build_output_step(
            trained.steps, lambda model, x, batch: model.logits(x)
        )
        found.append(program(trained.params, {"tokens": jnp.asarray(rows)}))
    np.testing.assert_allclose(found[0], found[1][:3], rtol=2e-5, atol=2e-5)


def test_way_of_training_plays_no_part(run, tmp_path):
    values = yaml.safe_load((run[0] / workdir.CONFIG_FILE).read_text())
    values["model"]["attention"] = "cudnn"
    values["zero"] = {"stage": 3, "min_size": 1}
    values["dist"] = {"pipeline_parallel_size": 2, "data_parallel_size": 8}
    values["remat"] = "full"
    (tmp_path / workdir.CONFIG_FILE).write_text(yaml.safe_dump(values))
    (tmp_path / workdir.CHECKPOINTS).symlink_to(run[0] / workdir.CHECKPOINTS)

    trained = open_trained(str(tmp_path), data_parallel_size=2)

    jax.tree.map(np.testing.assert_array_equal, trained.params, run[1].params)
    for leaf in jax.tree.leaves(trained.params):
        assert leaf.sharding.is_fully_replicated


def test_run_without_a_tokenizer_of_its_own_has_that_of_its_data(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(trained_runs.byte_tokenizer().to_str())
    data = {"seq_length": 8, "tokenizer": str(path)}
    trained_runs.make(tmp_path, data=data)
    assert open_trained(str(tmp_path)).tokenizer.encode("def").ids == [258]

    path.unlink()
    with pytest.raises(FileNotFoundError, match="own.json' is not a file"):
        open_trained(str(tmp_path))


def test_what_cannot_be_opened_is_an_error(run, tmp_path):
    directory = str(run[0])
    with pytest.raises(CheckpointError, match="no config.yaml. Name the workdir of"):
        open_trained(str(tmp_path))
    with pytest.raises(CheckpointError, match="has no checkpoint of step 9. It has 7."):
        open_trained(directory, step=9)
    with pytest.raises(ConfigError, match="needs 16 devices, but there are 8"):
        open_trained(directory, data_parallel_size=16)
    with pytest.raises(ConfigError, match="data_parallel_size=0 must be at least 1"):
        open_trained(directory, data_parallel_size=0)
    with pytest.raises(ConfigError, match="num_heads=4 is not divisible by"):
        open_trained(directory, tensor_parallel_size=8)


def test_model_of_another_config_is_an_error(run, tmp_path):
    config = (run[0] / workdir.CONFIG_FILE).read_text()
    (tmp_path / workdir.CONFIG_FILE).write_text(
        config.replace("max_len: 48", "max_len: 64")
    )
    (tmp_path / workdir.CHECKPOINTS).symlink_to(run[0] / workdir.CHECKPOINTS)
    with pytest.raises(CheckpointError, match=r"position: float32\[48,16\] in the"):
        open_trained(str(tmp_path))
