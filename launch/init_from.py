"""Begins a run with a pre-trained model, see `launch.origin`.

Parameters come from the directory straight onto the layout of the run, each device
reading its own part. What the model has besides, the head of a new task and adapters,
begins as it would without; step counter and optimizer begin at 0.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch import state
from launch.checkpoint import Checkpointer, CheckpointError
from launch.origin import Origin, open_origin
from launch.run_config import RunConfig
from launch.run_files import CHECKPOINTS
from launch.saved_form import SavedForm
from launch.step import StepConfig
from models import MODELS, convert, lora
from models.published import PUBLISHED
from models.published_files import open_published
from models.stacked import Params, combine, path_of, select

MAX_NAMES = 12  # in a line of the log
Leaves = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A state to train from, and where its parameters are from.

    Attributes:
        state: At step 0.
        report: Lines for the log.
    """

    state: state.TrainState
    report: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Parameters that are not read yet.

    Attributes:
        name: For people.
        problems: Why a parameter of the model is not to be had, by its path.
        unused: Names of those that the model has not.
        read: Reads those of the chosen paths, onto the layout of the run.
    """

    name: str
    problems: Mapping[str, str]
    unused: tuple[str, ...]
    read: Callable[[Callable[[str], bool]], Params]


def begin(config: RunConfig, steps: StepConfig, form: SavedForm) -> Begun:
    """Returns the state to train from.

    Args:
        config: Of the run, with ``init_from``.
        steps: Its programs.
        form: How its state is saved.

    Raises:
        CheckpointError: If parameters that are of no head are missing or of another
            shape, all of which are named; or if the directory cannot be read.
        OSError: If it is not there.
    """
    directory = config.root.init_from
    assert directory is not None
    try:
        origin = open_origin(directory)
        _check_adapters(origin, config.lora, directory)
        opened = _open_published if origin.is_published else _open_run
        source = opened(config, origin, form)
    except ValueError as error:
        raise CheckpointError(f"init_from: {error}") from error
    heads = MODELS[config.model_name].heads
    _check_fit(config, source, heads)
    params = source.read(lambda path: path not in source.problems)
    new = _new_params(steps, config.train.seed, lambda path: path in source.problems)
    begun = state.begin(
        steps.model,
        combine(params, new),
        steps.optimizer,
        shardings=steps.shardings,
        loss_scaling=steps.loss_scaling,
    )
    num_all = len(jax.tree.leaves(form.abstract.params))
    return Begun(state=begun, report=tuple(_report(source, num_all)))


def _check_adapters(origin: Origin, ours: lora.LoraConfig, directory: str) -> None:
    """Checks that adapters of the origin go on being what they are."""
    theirs = origin.lora
    same = ("rank", "alpha", "targets")
    if theirs.is_on and any(getattr(theirs, f) != getattr(ours, f) for f in same):
        raise ValueError(
            f"'{directory}' holds adapters, lora.rank={theirs.rank}"
            f" alpha={theirs.alpha} targets={theirs.targets}, and this run has"
            f" lora.rank={ours.rank} alpha={ours.alpha} targets={ours.targets}. Take"
            " the same ones, or merge them first: python -m launch.merge_lora"
            f" {origin.directory} OUT, and begin with OUT."
        )


def _check_fit(config: RunConfig, source: _Source, heads: frozenset[str]) -> None:
    wrong = {
        path: problem
        for path, problem in source.problems.items()
        if path.split("/")[0] not in heads and not lora.is_adapter(path)
    }
    if wrong:
        lines = [f"  {path} {problem}" for path, problem in wrong.items()]
        if len(lines) > MAX_NAMES:
            lines[MAX_NAMES:] = [f"  ... and {len(lines) - MAX_NAMES} more."]
        may = ", ".join(sorted(heads)) or "this model has none"
        raise CheckpointError(
            f"init_from: {source.name} does not fit this {config.model_name}:\n"
            + "\n".join(lines)
            + f"\nOnly heads ({may}) and adapters may begin anew. Use the sizes it was"
            " made with, or another directory."
        )


def _open_published(config: RunConfig, origin: Origin, form: SavedForm) -> _Source:
    """Opens a checkpoint in the format of Hugging Face."""
    name, directory = config.model_name, str(origin.directory)
    if name not in PUBLISHED:
        raise ValueError(
            f"a {name} has no counterpart in the format of Hugging Face, in which"
            f" '{directory}' is. Name the workdir of a run."
        )
    table = PUBLISHED[name].table(config.model)
    tensors = convert.tensors_by_name(name, open_published(directory))
    problems, used = {}, set()
    for path, leaf in _by_path(form.abstract_saved.params).items():
        if path not in table:  # an adapter
            problems[path] = "is missing."
            continue
        needed = convert.needed_shapes(table, path, leaf, config.model.num_layers)
        used |= set(needed)
        for each, shape in needed.items():
            if each not in tensors:
                problems[path] = f"is missing: there is no {each}."
            elif tensors[each].shape != shape:
                problems[path] = (
                    f"is of another shape: {each} has {tensors[each].shape}, but the"
                    f" model needs {shape}."
                )
            elif not jnp.issubdtype(tensors[each].dtype, jnp.floating):
                problems[path] = f"is no float: {each} is of {tensors[each].dtype}."

    def read(is_chosen: Callable[[str], bool]) -> Params:
        chosen = select(form.abstract.params, is_chosen)
        return convert.stream(table, tensors, chosen, layer_order=form.layer_order)

    return _Source(
        name=f"the {origin.model_name} in '{directory}'",
        problems=problems,
        unused=tuple(name for name in tensors if name not in used),
        read=read,
    )


def _open_run(config: RunConfig, origin: Origin, form: SavedForm) -> _Source:
    """Opens a checkpoint of a run."""
    folder = origin.directory / CHECKPOINTS
    with Checkpointer(folder) as checkpointer:
        step = origin.step
        if step is None:
            step = checkpointer.latest_step()
        saved = checkpointer.read_shapes(step, part="params")
    theirs, ours = _by_path(saved), _by_path(form.abstract_saved.params)
    problems = {}
    for path, leaf in ours.items():
        if path not in theirs:
            problems[path] = "is missing."
        elif not _fits(theirs[path].shape, leaf.shape, origin.model, config.model):
            problems[path] = (
                f"is of another shape: it has {theirs[path].shape}, but the model needs"
                f" {leaf.shape}."
            )

    def read(is_chosen: Callable[[str], bool]) -> Params:
        part = dataclasses.replace(
            form, abstract=select(form.abstract.params, is_chosen)
        )
        wanted = part.abstract_saved
        with Checkpointer(folder) as checkpointer:
            found = checkpointer.restore(
                jax.tree.map_with_path(
                    lambda path, leaf: _as_saved(leaf, theirs[path_of(path)]), wanted
                ),
                step,
                part="params",
                allow_unused=True,
            )
        return part.from_saved(jax.tree.map(_to_wanted, found, wanted))

    return _Source(
        name=f"the {origin.model_name} in '{origin.directory}', step {step}",
        problems=problems,
        unused=tuple(path for path in theirs if path not in ours),
        read=read,
    )


def _by_path(tree: Params) -> Leaves:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_of(path): leaf for path, leaf in leaves}


def _fits(theirs: tuple, ours: tuple, their_model: Any, our_model: Any) -> bool:
    """Whether shapes are the same, up to the padding of a vocabulary."""
    if theirs == ours:
        return True
    sizes = [
        getattr(model, "padded_vocab_size", None) for model in (their_model, our_model)
    ]
    return theirs[1:] == ours[1:] and [*theirs[:1], *ours[:1]] == sizes


def _as_saved(leaf: Any, saved: Any) -> jax.ShapeDtypeStruct:
    """Returns what to read: parts of it if it has the shape that is wanted."""
    sharding = leaf.sharding
    if saved.shape != leaf.shape:
        sharding = NamedSharding(sharding.mesh, P())
    return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=sharding)


def _to_wanted(found: jax.Array, leaf: Any) -> jax.Array:
    """Returns what was read in the shape and dtype that is wanted."""
    if (found.shape, found.dtype) == (leaf.shape, leaf.dtype):
        return found

    def convert(x: jax.Array) -> jax.Array:
        num_rows = min(len(x), leaf.shape[0])
        padding = [(0, leaf.shape[0] - num_rows)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x[:num_rows], padding).astype(leaf.dtype)

    return jax.jit(convert, out_shardings=leaf.sharding)(found)


def _new_params(
    steps: StepConfig, seed: int, is_chosen: Callable[[str], bool]
) -> Params:
    """Returns the chosen parameters as they are without a pre-trained model."""
    shardings = select(steps.shardings.params, is_chosen)

    def init(seed: jax.Array) -> Params:
        return select(steps.model.init(jax.random.key(seed)), is_chosen)

    return jax.jit(init, out_shardings=shardings)(seed)


def _report(source: _Source, num_all: int) -> Iterable[str]:
    num_found = num_all - len(source.problems)
    yield f"begins with {source.name}: {num_found} of {num_all} parameters"
    if source.problems:
        yield "  new: " + _shorten(source.problems)
    if source.unused:
        yield "  not used: " + _shorten(source.unused)


def _shorten(names: Iterable[str]) -> str:
    names = list(names)
    more = [f"and {len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return ", ".join([*names[:MAX_NAMES], *more])
