"""Converts between checkpoints of Hugging Face and of this project.

    python -m launch.convert --from=hf --to=sbp gpt2/ runs/gpt2
    python -m launch.convert --from=sbp --to=hf runs/gpt2 exported/

The format ``sbp`` is the workdir of a run: from ``hf`` one gets the state at step 0,
which ``python -m launch.train --resume`` trains on any layout, and ``--eval_only``
evaluates. All values are kept bit by bit.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import tokenizers

from launch import (
    command_line,
    distributed,
    job,
    origin,
    resolve,
    state,
    step,
    workdir,
)
from launch.checkpoint import Checkpointer
from launch.data import tokenizer
from launch.resolve import DeviceCount
from launch.run_config import RunConfig
from models import convert, lora, published_config
from models.published_files import (
    PREPROCESSOR_FILE,
    PublishedFiles,
    open_published,
    read_preprocessor,
)
from models.stacked import Params

# The saved form is the same on every layout, so one device does.
ONE_DEVICE = DeviceCount(num_devices=1)
ONE_DEVICE_SIZES = {
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
}
# The flags that are about one direction, and from which format it goes.
OF_FORMAT = {
    "config": "hf",
    "step": "sbp",
    "allow_missing": "hf",
    "allow_unexpected": "hf",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a command line says.

    Attributes:
        source: Directory to read.
        target: Directory to write, new or empty.
        source_format: ``"hf"`` or ``"sbp"``.
        target_format: The other one.
        config: From ``hf``: config file of everything but the model.
        step: From ``sbp``: which checkpoint; None for the newest.
        allow_missing: From ``hf``: make new values for what is missing.
        allow_unexpected: From ``hf``: pass over what has no use.
    """

    source: str
    target: str
    source_format: str
    target_format: str
    config: str | None = None
    step: int | None = None
    allow_missing: bool = False
    allow_unexpected: bool = False


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    options = parse(arguments)
    return command_line.exit_code(lambda: run(options))


def parse(arguments: Sequence[str]) -> Options:
    """Returns what the command line says; argparse ends the program if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.convert",
        description="Converts checkpoints between the formats hf and sbp.",
        allow_abbrev=False,
    )
    formats = ("hf", "sbp")
    parser.add_argument("source", help="directory to read")
    parser.add_argument("target", help="directory to write, new or empty")
    add = parser.add_argument
    add(
        "--from",
        dest="source_format",
        choices=formats,
        required=True,
        help="format of the source: of Hugging Face, or the workdir of a run",
    )
    add(
        "--to",
        dest="target_format",
        choices=formats,
        required=True,
        help="format of the target: the other one",
    )
    add("--config", help="from hf: config file of everything but the model")
    add("--step", type=int, help="from sbp: of the checkpoint, if not the newest")
    add(
        "--allow_missing",
        action="store_true",
        help="from hf: make new values for what is missing",
    )
    add(
        "--allow_unexpected",
        action="store_true",
        help="from hf: pass over what has no use",
    )
    options = Options(**vars(parser.parse_args(arguments)))
    if options.source_format == options.target_format:
        parser.error(
            f"--from and --to are both {options.target_format}. Make one hf, one sbp."
        )
    for name, of in OF_FORMAT.items():
        value = getattr(options, name)
        if value not in (None, False) and of != options.source_format:
            parser.error(
                f"--{name} is for --from={of}, not for --from={options.source_format}."
                " Leave it out."
            )
    return options


def run(options: Options) -> None:
    """Converts as the options say, and prints what there is now."""
    convert_one = import_run if options.source_format == "hf" else export_run
    num_params, config = convert_one(options)
    print(
        f"{options.target}: {config.model_name} of {num_params:,} parameters in"
        f" {config.model.param_dtype}, from {options.source}"
    )


def import_run(options: Options) -> tuple[int, RunConfig]:
    """Writes the workdir of a run that begins with a published checkpoint.

    Returns:
        The number of parameters, padding of the vocabulary included, and the config.

    Raises:
        ValueError: If checkpoint or config do not fit.
        CheckpointError: If it cannot be written.
        OSError: If files are missing, or the target is not empty.
    """
    workdir.check_new(options.target)
    files = open_published(options.source)
    config = _config_of(files, options.config)
    if config.lora.is_on:
        raise ValueError(
            f"--config={options.config} has adapters, lora.rank={config.lora.rank}, of"
            " which a published checkpoint knows nothing. Leave them out here, or train"
            f" with init_from={options.source} instead."
        )
    steps = build_steps(config)
    initial = None
    if options.allow_missing:
        initial = state.create_state(
            steps.model,
            steps.optimizer,
            seed=config.train.seed,
            shardings=steps.shardings,
            loss_scaling=steps.loss_scaling,
        ).params
    params = convert.load(
        config.model_name,
        config.model,
        files,
        abstract=_abstract_params(steps),
        initial=initial,
        allow_unexpected=options.allow_unexpected,
    )
    num_params = count_parameters(params)
    path = config.data.tokenizer
    tokens = None if path is None else tokenizer.open_file(path)
    write_run(options.target, config, steps, params, tokens)
    return num_params, config


def export_run(options: Options) -> tuple[int, RunConfig]:
    """Writes a checkpoint of a run in the published format; see `import_run`.

    Adapters are merged into the weights.
    """
    workdir.check_new(options.target)
    source = pathlib.Path(options.source)
    config, params = read_run(source, options.step)
    params = lora.merge(params, config.lora.scale)
    convert.save(
        config.model_name,
        config.model,
        params,
        options.target,
        classes=config.data.classes,
    )
    workdir.copy_tokenizer(options.source, options.target)
    if config.model_name == "vit":
        values = published_config.to_preprocessor(
            config.model, config.data.pixel_mean, config.data.pixel_std
        )
        path = pathlib.Path(options.target) / PREPROCESSOR_FILE
        path.write_text(json.dumps(values, indent=2) + "\n")
    return count_parameters(params), config


def read_run(directory: pathlib.Path, step: int | None) -> tuple[RunConfig, Params]:
    """Returns the config of a run, for one device, and the parameters of a checkpoint.

    Args:
        directory: Its workdir.
        step: Of the checkpoint. None for the newest.

    Raises:
        ConfigError: If its config is not of this version.
        CheckpointError: If it is no workdir, or the checkpoint cannot be read.
    """
    values = workdir.load_config(str(directory))
    config = resolve.resolve(for_one_device(values), {}, ONE_DEVICE)
    abstract = _abstract_params(build_steps(config))
    with Checkpointer(directory / workdir.CHECKPOINTS) as checkpointer:
        return config, checkpointer.restore(abstract, step, part="params")


def write_run(
    directory: str,
    config: RunConfig,
    steps: step.StepConfig,
    params: Params,
    tokens: tokenizers.Tokenizer | None = None,
) -> None:
    """Writes the workdir of a run that begins with parameters, at step 0.

    Args:
        directory: To make, or an empty one.
        config: Of the run, for one device.
        steps: Its programs.
        params: On that device; donated.
        tokens: Its tokenizer, which is written too; None for none.
    """
    start = state.begin(
        steps.model,
        params,
        steps.optimizer,
        shardings=steps.shardings,
        loss_scaling=steps.loss_scaling,
    )
    workdir.prepare(directory, config, tokens)
    with Checkpointer(pathlib.Path(directory) / workdir.CHECKPOINTS) as checkpointer:
        extra = {"config": resolve.to_values(config), "num_samples": 0}
        checkpointer.save(0, start, extra=extra)


def for_one_device(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a config without its layout and what it began with."""
    kept = {n: v for n, v in values.items() if n not in ("zero", "init_from")}
    return {**kept, "dist": dict(ONE_DEVICE_SIZES)}


def _config_of(files: PublishedFiles, path: str | None) -> RunConfig:
    """Returns the config of a run of a published model."""
    values = resolve.load(path) if path else {}
    name, model = convert.read_config(files)
    values = for_one_device(values)
    values["model"] = {"name": name, **dataclasses.asdict(model)}
    data: dict[str, Any] = dict(values.get("data", {}))
    if data.get("tokenizer") is None:
        data["tokenizer"] = origin.find_tokenizer(files.directory)
    if name != "vit" and "seq_length" not in data:
        data["seq_length"] = min(128, model.max_len)
    if name in published_config.CLASSIFIERS and data.get("classes") is None:
        data["classes"] = published_config.class_names(files.config)
    if name == "vit":
        given = read_preprocessor(files.directory)
        data = published_config.pixel_statistics(given) | data
    return resolve.resolve({**values, "data": data}, {}, ONE_DEVICE)


def build_steps(config: RunConfig) -> step.StepConfig:
    """Returns the programs of a run on one device."""
    return job.build_steps(config, distributed.create_mesh(config.dist, ONE_DEVICE))


def _abstract_params(steps: step.StepConfig) -> Params:
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    return abstract.params


def count_parameters(params: Params) -> int:
    """Returns the number of parameters, padding of the vocabulary included."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
