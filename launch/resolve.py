"""From a config file and overrides to a `RunConfig`, and back to ``config.yaml``.

Everything that is wrong is found before any array exists, and listed in one error.
Nothing is clamped or rewritten: a value is what the user wrote, or an error.
"""

import ast
import dataclasses
import pathlib
import runpy
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from launch import (
    adapters,
    attention,
    context_parallel,
    families,
    pipelines,
    precision,
    run_config,
    typed_fields,
)
from launch import origin as origins
from launch.run_config import RootConfig, RunConfig
from models import MODELS

SECTIONS: Mapping[str, type] = {
    "data": run_config.DataConfig,
    "optim": run_config.OptimConfig,
    "train": run_config.TrainConfig,
    "dist": run_config.DistConfig,
    "zero": run_config.ZeroConfig,
    "precision": run_config.PrecisionConfig,
    "lora": run_config.LoraConfig,
    "eval": run_config.EvalConfig,
    "checkpoint": run_config.CheckpointConfig,
}
ROOT_FIELDS = tuple(field.name for field in dataclasses.fields(RootConfig))
KNOWN = ("model", *SECTIONS, *ROOT_FIELDS)
TUPLES_OF_TEXT = (tuple[str, ...], tuple[str, ...] | None)
Values = dict[str, Any]
# What a mistake in a config file ends with. For a mistyped field of a ConfigDict it is
# an AttributeError, whose message suggests another.
FAULTS_OF_A_FILE = (
    AttributeError,
    ImportError,
    KeyError,
    NameError,
    SyntaxError,
    TypeError,
    UnicodeError,
    yaml.YAMLError,
)


class ConfigError(ValueError):
    """A run config that breaks rules; the message lists them all."""

    def __init__(self, problems: list[str]):
        count = "1 rule" if len(problems) == 1 else f"{len(problems)} rules"
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"The run config breaks {count}:\n{lines}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCount:
    """How many devices a run may have.

    Attributes:
        num_devices: Those there are, or None for as many virtual CPU devices as the
            run asks for.
        most: Largest number of virtual ones.
        remedy: How to have another number.
        reason: Why the devices are virtual ones.
        platform: Of those there are, as JAX calls it; None if it is not known.
    """

    num_devices: int | None
    most: int = 64
    remedy: str = ""
    reason: str = "there is no GPU"
    platform: str | None = None


def load(path: str) -> Values:
    """Returns the fields of a config file: sections are dicts of them.

    Args:
        path: A Python file with ``get_config()``, or a ``config.yaml`` that a run has
            saved.

    Raises:
        ConfigError: If there is no such file, or it is not of this form.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        problem = "this is a folder" if file.is_dir() else "there is no such file"
        raise ConfigError(
            [f"--config={path}: {problem}. Name a .py file, or a run's config.yaml."]
        )
    try:
        if file.suffix == ".py":
            script = runpy.run_path(path)
            if "get_config" not in script:
                raise ConfigError([f"--config={path}: it defines no get_config()."])
            values = script["get_config"]().to_dict()
        else:
            values = yaml.safe_load(file.read_text())
    except FAULTS_OF_A_FILE as error:
        message = " ".join(str(error).split())
        raise ConfigError(
            [f"--config={path}: {type(error).__name__}: {message}"]
        ) from error
    if not isinstance(values, dict) or not all(
        isinstance(value, dict) or name in ROOT_FIELDS for name, value in values.items()
    ):
        raise ConfigError([f"--config={path}: it is not a mapping of sections."])
    return values


def resolve(
    values: Values,
    overrides: Mapping[str, str],
    devices: DeviceCount,
    *,
    origin: str | None = None,
) -> RunConfig:
    """Returns the run config, with every field set that the run derives.

    Args:
        values: As `load` gives them; a section or field that is missing has its
            default.
        overrides: Texts by dotted field, such as ``{"dist.data_parallel_size": "2"}``.
        devices: What the run may use.
        origin: Directory that has the fields which ``init_from`` leaves open, if that
            is not read any more. None if it is.

    Raises:
        ConfigError: With every rule that is broken.
    """
    problems: list[str] = []
    values = _by_section(values)
    problems += typed_fields.unknown("section", filter(None, values), KNOWN)
    model_values = values.get("model", {})
    name = overrides.get("model.name", model_values.pop("name", None))
    if name not in MODELS:
        known = ", ".join(map(repr, MODELS))
        raise ConfigError([*problems, f"model.name={name!r} is not one of {known}."])

    types_of = {"": RootConfig, "model": MODELS[name].config, **SECTIONS}
    overrides = {k: v for k, v in overrides.items() if k != "model.name"}
    problems += _apply_overrides(values, overrides, types_of)
    if isinstance(directory := values[""].get("init_from"), str):
        problems += origins.fill(values, name, origin or directory)
    sections = {}
    for section, config_type in types_of.items():
        given = values.get(section, {})
        if section == "dist":
            given = _derive_data_parallel_size(given, devices)
        found, section_problems = typed_fields.build(config_type, given)
        if not section_problems:
            section_problems = list(found.broken_rules())
        prefix = f"{section}." if section else ""
        problems += [f"{prefix}{problem}" for problem in section_problems]
        sections[section or "root"] = found
    if problems:
        raise ConfigError(problems)

    config = RunConfig(model_name=name, **sections)
    if problems := list(_broken_relations(config, devices)):
        raise ConfigError(problems)
    dist = dataclasses.replace(config.dist, pipeline_num_layers=config.model.num_layers)
    formats = config.precision.resolved(config.model.dtype)
    return dataclasses.replace(config, dist=dist, precision=formats)


def shorten(config: RunConfig) -> RunConfig:
    """Returns the config of a fast development run.

    Two steps of one sample per microbatch, every one logged, and one batch of
    evaluation at the end.
    """
    ranks, parts = config.dist.data_parallel_size, config.train.num_microbatches
    train = dataclasses.replace(
        config.train,
        num_steps=2,
        global_batch_size=ranks * parts,
        rampup_batch_size=None,
        log_every=1,
    )
    optim = dataclasses.replace(config.optim, warmup_steps=0)
    evaluation = run_config.EvalConfig(every_steps=None, num_batches=1)
    checkpoint = dataclasses.replace(config.checkpoint, every_steps=None)
    return dataclasses.replace(
        config, train=train, optim=optim, eval=evaluation, checkpoint=checkpoint
    )


def to_values(config: RunConfig) -> Values:
    """Returns the fields as plain dicts, such as YAML and JSON can hold."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    model = {"name": config.model_name, **dataclasses.asdict(config.model)}
    return _plain({**dataclasses.asdict(config.root), "model": model, **sections})


def by_path(values: Values) -> dict[str, Any]:
    """Returns the value of each field by its dotted path."""
    return {
        f"{section}.{field}" if section else field: value
        for section, fields in _by_section(values).items()
        for field, value in fields.items()
    }


def to_yaml(config: RunConfig) -> str:
    """Returns the config as the text of a file that `load` reads back."""
    return yaml.safe_dump(to_values(config), sort_keys=False)


def _by_section(values: Values) -> dict[str, dict[str, Any]]:
    """Returns the fields of each section; those of none are in the section ''."""
    root = {name: value for name, value in values.items() if name in ROOT_FIELDS}
    sections = {name: dict(s) for name, s in values.items() if name not in ROOT_FIELDS}
    return {"": root, **sections}


def _derive_data_parallel_size(
    given: Mapping[str, Any], devices: DeviceCount
) -> dict[str, Any]:
    if given.get("data_parallel_size") is not None:
        return dict(given)
    kinds = "tensor", "pipeline", "context"
    others = [given.get(f"{kind}_parallel_size", 1) for kind in kinds]
    used = 1
    for size in others:
        # A size of another type or sign is reported where types and signs are.
        used *= size if isinstance(size, int) and size > 0 else 1
    size = max(1, devices.num_devices // used) if devices.num_devices else 1
    return {**given, "data_parallel_size": size}


def _broken_relations(config: RunConfig, devices: DeviceCount) -> Iterator[str]:
    """Yields one sentence per broken rule between sections, or with the devices."""
    yield from config.broken_rules()
    yield from families.broken_rules(config)
    yield from pipelines.broken_rules(config)
    yield from context_parallel.broken_rules(config)
    yield from _broken_attention_rules(config, devices)
    yield from adapters.broken_rules(config)
    yield from _broken_precision_rules(config)
    yield from _broken_device_rules(config, devices)


_NO_HISTORY = (
    "precision.fp8_scaling='delayed' is of linear maps as a model has them, but {}"
    " replaces them. Use precision.fp8_scaling='current'."
)


def _broken_precision_rules(config: RunConfig) -> Iterator[str]:
    family, patterns = MODELS[config.model_name], config.precision.float32
    for problem in precision.broken_patterns(family, config.model, patterns):
        yield f"precision.{problem}"
    tensor = config.dist.tensor_parallel_size
    yield from precision.broken_sizes(config.model, config.precision, tensor)
    if config.precision.fp8_scaling == "delayed":
        if config.dist.sequence_parallel:
            yield _NO_HISTORY.format("dist.sequence_parallel=True")
        if config.lora.is_on:
            yield _NO_HISTORY.format(f"lora.rank={config.lora.rank}")


def _broken_device_rules(config: RunConfig, devices: DeviceCount) -> Iterator[str]:
    dist = config.dist
    sizes = f"dist: {dist.sizes} needs {dist.num_devices} devices"
    if devices.num_devices is None:
        if dist.num_devices > devices.most:
            yield (
                f"{sizes}, but without GPUs a run has at most {devices.most} virtual"
                " CPU devices. Make a size smaller, or run where the GPUs are."
            )
    elif dist.num_devices != devices.num_devices:
        yield (
            f"{sizes}, but there are {devices.num_devices}. Choose sizes whose product"
            f" is {devices.num_devices}{devices.remedy}."
        )


def _broken_attention_rules(config: RunConfig, devices: DeviceCount) -> Iterator[str]:
    platform = "cpu" if devices.num_devices is None else devices.platform
    length = families.FAMILIES[config.model_name].num_tokens(config)
    length = context_parallel.part_length(config, length)
    rules = attention.broken_rules(config.model, platform=platform, length=length)
    yield from (f"model.{rule}" for rule in rules)


def _apply_overrides(
    values: Values, overrides: Mapping[str, str], types_of: Mapping[str, type]
) -> list[str]:
    problems = []
    for path, text in overrides.items():
        section, _, field = ("." + path if path in ROOT_FIELDS else path).partition(".")
        known = types_of if section == "" else KNOWN
        unknown = typed_fields.unknown("section", [section], known)
        if not unknown and not field:
            problems.append(
                f"{path}={text} names a section. Write --config.{path}.FIELD=VALUE."
            )
            continue
        if not unknown:
            hints = typing.get_type_hints(types_of[section])
            unknown = typed_fields.unknown(
                "field", [field], hints, prefix=f"{section}."
            )
        if unknown:
            problems += unknown
            continue
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        if isinstance(value, str) and hints[field] in TUPLES_OF_TEXT:
            value = tuple(value.split(","))
        values.setdefault(section, {})[field] = value
    return problems


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
