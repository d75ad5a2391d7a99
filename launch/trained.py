"""Opens the workdir of a run to use its model, on any layout without a pipeline.

The parameters are all that is read of a checkpoint; batch size, optimizer, layout and
implementation of attention of the run play no part.
"""

import dataclasses
import pathlib
from typing import Any

import tokenizers
from jax.sharding import Mesh

from launch import distributed, job, resolve, state, step, workdir
from launch.checkpoint import Checkpointer
from launch.data import tokenizer
from launch.resolve import DeviceCount
from launch.run_config import RunConfig
from models.stacked import Params

# Sections of a saved config that say how to train, not what the model is.
TRAINING_SECTIONS = (
    *("optim", "train", "dist", "zero", "eval", "checkpoint"),
    *("remat", "init_from"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained model, ready for use.

    Attributes:
        directory: Where it is from.
        config: Of its run, with the layout and the batch size of this use.
        mesh: Its devices, along ``data`` and ``tensor``; other axes are of one.
        steps: What programs are built from, such as by `step.build_output_step`; a
            batch is of any size that the data-parallel size divides.
        params: Parameters, blocks stacked, on the mesh.
        tokenizer: From text to ids and back; None if the run has none.
        step: Of the checkpoint.
    """

    directory: str
    config: RunConfig
    mesh: Mesh
    steps: step.StepConfig
    params: Params
    tokenizer: tokenizers.Tokenizer | None
    step: int

    @property
    def data_parallel_size(self) -> int:
        """Parts into which a batch is split."""
        return self.mesh.shape["data"]

    def need_tokenizer(self) -> tokenizers.Tokenizer:
        """Returns the tokenizer.

        Raises:
            ValueError: If the run has none.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"'{self.directory}' has no tokenizer, without which texts are of no"
                f" use to the model. Put its {workdir.TOKENIZER_FILE} there."
            )
        return self.tokenizer


def open_trained(
    directory: str,
    *,
    step: int | None = None,
    data_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
) -> Trained:
    """Returns the model of a run, from a checkpoint that any layout may have saved.

    Args:
        directory: The workdir of a run, or what ``launch.convert --to=sbp`` has made.
        step: Which checkpoint. None for the newest.
        data_parallel_size: Replicas of the model, each with a part of a batch.
        tensor_parallel_size: Devices of each replica.

    Raises:
        CheckpointError: If it is no workdir, or has no such checkpoint, or one that
            cannot be read.
        ConfigError: If the layout fits neither the model nor the devices.
        OSError: If its tokenizer is missing.
        ValueError: If its tokenizer cannot be read.
    """
    folder = pathlib.Path(directory)
    values = _use_values(
        workdir.load_config(directory), data_parallel_size, tensor_parallel_size
    )
    num_devices = data_parallel_size * tensor_parallel_size
    devices = _limit(distributed.count_devices(), num_devices)
    config = resolve.resolve(values, {}, devices)
    mesh = distributed.create_mesh(config.dist, devices)
    steps = job.build_steps(config, mesh)
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    with Checkpointer(folder / workdir.CHECKPOINTS) as checkpointer:
        params = checkpointer.restore(abstract.params, step, part="params")
        found = checkpointer.latest_step() if step is None else step
    assert found is not None  # or there was nothing to restore
    return Trained(
        directory=directory,
        config=config,
        mesh=mesh,
        steps=steps,
        params=params,
        tokenizer=_open_tokenizer(folder, config),
        step=found,
    )


def _use_values(values: dict[str, Any], data: int, tensor: int) -> dict[str, Any]:
    """Returns the values of a saved config, for use on a layout."""
    kept = {name: v for name, v in values.items() if name not in TRAINING_SECTIONS}
    # Attention is computed as it is fastest here, which may be on other devices.
    model = {name: v for name, v in values["model"].items() if name != "attention"}
    # Each data-parallel rank has a vocabulary of its own: there is one stage.
    dist = {
        "data_parallel_size": data,
        "tensor_parallel_size": tensor,
        "pipeline_vocabulary": "first_and_last_stage",
    }
    train = {"global_batch_size": max(data, 1)}
    return {**kept, "model": model, "dist": dist, "train": train}


def _limit(devices: DeviceCount, num_devices: int) -> DeviceCount:
    """Returns as many of the devices as are asked for, if there are so many."""
    if devices.num_devices is None or devices.num_devices < num_devices:
        return devices
    return dataclasses.replace(devices, num_devices=max(num_devices, 1))


def _open_tokenizer(
    folder: pathlib.Path, config: RunConfig
) -> tokenizers.Tokenizer | None:
    path = workdir.tokenizer(str(folder)) or config.data.tokenizer
    return None if path is None else tokenizer.open_file(path)
