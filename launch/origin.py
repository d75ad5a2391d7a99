"""What a pre-trained directory holds: the model that ``config.init_from`` begins with.

It is the workdir of a run, one of its checkpoints (``runs/x/checkpoints/400``), or a
checkpoint in the format of Hugging Face. The sizes of the model are those it has there:
a config may leave them out, or name the same ones.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import yaml

from launch import typed_fields
from launch.families import FAMILIES
from launch.run_files import CHECKPOINTS, CONFIG_FILE, TOKENIZER_FILE
from models import MODELS, published_config
from models.lora import LoraConfig
from models.published_files import CONFIG_FILE as PUBLISHED_CONFIG_FILE

TOKENIZER_FILES = (TOKENIZER_FILE, "vocab.txt")
# How a run computes: not a matter of the model that it begins with.
OWN_FIELDS = frozenset("dtype param_dtype attention loss_chunk_size".split())
# What another task, or another way to train, may have otherwise.
FREE_FIELDS = OWN_FIELDS | frozenset(
    "num_classes vocab_multiple init_scale dropout_rate attention_dropout_rate"
    " stochastic_depth_rate".split()
)

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A pre-trained model, of which nothing but the config is read.

    Attributes:
        directory: Where it is.
        model_name: Key of `models.MODELS`.
        model: Its config.
        is_published: Whether it is in the format of Hugging Face.
        step: Of the checkpoint in a workdir; None for the newest.
        lora: Its adapters.
        tokenizer: Path of its tokenizer; None if it has none.
    """

    directory: pathlib.Path
    model_name: str
    model: Any
    is_published: bool
    step: int | None = None
    lora: LoraConfig = LoraConfig()
    tokenizer: str | None = None


def open_origin(directory: str) -> Origin:
    """Returns what a directory holds.

    Raises:
        FileNotFoundError: If it is none of these.
        ValueError: If its config cannot be read, or is of a model that is unknown here.
    """
    path, step = pathlib.Path(directory), None
    if path.parent.name == CHECKPOINTS and path.name.isdecimal():
        path, step = path.parent.parent, int(path.name)
    if (path / CONFIG_FILE).is_file():
        return _of_run(path, step)
    if (path / PUBLISHED_CONFIG_FILE).is_file():
        return _of_published(path)
    problem = f"holds neither {CONFIG_FILE} nor {PUBLISHED_CONFIG_FILE}"
    raise FileNotFoundError(
        f"'{directory}' {problem if path.is_dir() else 'is no directory'}. Name the"
        " workdir of a run, one of its checkpoints such as"
        " 'runs/x/checkpoints/400', or a checkpoint in the format of Hugging Face."
    )


def fill(values: dict[str, Values], model_name: str, directory: str) -> list[str]:
    """Sets the fields that a config leaves to the model it begins with.

    These are the sizes of the model, and the tokenizer if the model reads text.

    Args:
        values: Fields by section; changed in place. In the section ``model`` one that
            is None is left out.
        model_name: Of the model that begins.
        directory: To begin with.

    Returns:
        A sentence for everything that does not fit.
    """
    try:
        origin = open_origin(directory)
    except (OSError, ValueError) as error:
        return [f"init_from: {error}"]
    wanted = MODELS[model_name].config
    if not _is_related(type(origin.model), wanted):
        names = [
            n for n, m in MODELS.items() if _is_related(type(origin.model), m.config)
        ]
        return [
            f"init_from: '{directory}' holds a {origin.model_name}, which a"
            f" {model_name} cannot begin with. Name another directory, or set"
            f" model.name to {' or '.join(map(repr, names))}."
        ]
    given = {n: v for n, v in values.get("model", {}).items() if v is not None}
    known = {field.name for field in dataclasses.fields(wanted)}
    theirs = dataclasses.asdict(origin.model)
    taken = {n: v for n, v in theirs.items() if n in known and n not in OWN_FIELDS}
    values["model"] = {**taken, **given}
    data = values.setdefault("data", {})
    if "tokenizer" in FAMILIES[model_name].data_fields and not data.get("tokenizer"):
        data["tokenizer"] = origin.tokenizer
    return [*_broken_size_rules(given, taken, directory)]


def find_tokenizer(directory: pathlib.Path) -> str | None:
    """Returns the path of the tokenizer in a directory of Hugging Face, None if none.

    Args:
        directory: With the files of a model.
    """
    files = [directory / name for name in TOKENIZER_FILES]
    return next((str(file.absolute()) for file in files if file.is_file()), None)


def _broken_size_rules(given: Values, theirs: Values, directory: str) -> Iterator[str]:
    for name, value in given.items():
        if name in theirs and name not in FREE_FIELDS and value != theirs[name]:
            yield (
                f"model.{name}={value!r}, but the model in '{directory}' has"
                f" {theirs[name]!r}. Set that, or leave it out (None) to take what the"
                " model has."
            )


def _of_run(path: pathlib.Path, step: int | None) -> Origin:
    try:
        values = yaml.safe_load((path / CONFIG_FILE).read_text())
        fields = dict(values["model"])
        name = fields.pop("name")
        model, problems = typed_fields.build(MODELS[name].config, fields)
        lora, more = typed_fields.build(LoraConfig, values.get("lora", {}))
    except (yaml.YAMLError, UnicodeError, TypeError, KeyError) as error:
        problems, more = [f"{type(error).__name__}: {error}"], []
    if problems or more:
        raise ValueError(
            f"'{path / CONFIG_FILE}' is not the config of a run of this version:"
            f" {' '.join([*problems, *more])} Restore it from a copy."
        )
    copy = path / TOKENIZER_FILE
    tokenizer = values.get("data", {}).get("tokenizer")
    if copy.is_file() and not (tokenizer and pathlib.Path(tokenizer).is_file()):
        tokenizer = str(copy.absolute())
    return Origin(
        directory=path,
        model_name=name,
        model=model,
        is_published=False,
        step=step,
        lora=lora,
        tokenizer=tokenizer,
    )


def _of_published(path: pathlib.Path) -> Origin:
    try:
        config = json.loads((path / PUBLISHED_CONFIG_FILE).read_text())
    except ValueError as error:
        raise ValueError(
            f"'{path / PUBLISHED_CONFIG_FILE}' is not JSON: {error}. Download it again."
        ) from error
    name, model = published_config.from_published(config)
    return Origin(
        directory=path,
        model_name=name,
        model=model,
        is_published=True,
        tokenizer=find_tokenizer(path),
    )


def _is_related(one: type, other: type) -> bool:
    """Whether one config has all that the other has: their models share an encoder."""
    return issubclass(one, other) or issubclass(other, one)
