"""Saves and restores the train state with Orbax, onto another layout too.

A checkpoint directory holds one directory per step: the arrays under ``state``, what
is JSON under ``extra``, ``checksums`` and ``metrics``. A step directory carries its
final name only once it is complete, so a save that was killed is never mistaken for a
checkpoint.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from launch import checksum, quiet, tree_difference
from launch.checkpoint_words import describe_absence, reason, shorten

PyTree = Any


class CheckpointError(Exception):
    """A checkpoint cannot be written or read; the message says why and what to do."""


class Checkpointer:
    """The checkpoints of one run, kept in one directory.

    The newest ``keep`` checkpoints stay, and the best one. Without a metric a
    checkpoint is never the best. Nothing is created before the first save, and
    reading changes nothing on disk; it waits for a save of this run, as `wait` does.

    With several processes each calls every method, with the same arguments.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        best_metric: str = "loss",
        best_mode: str = "min",
    ):
        """Creates nothing yet.

        Args:
            directory: Of the checkpoints; its parents are created too.
            keep: Newest checkpoints to keep, at least 1.
            best_metric: Name of the metric, among those given to `save`, by which the
                best checkpoint is chosen.
            best_mode: ``"min"`` or ``"max"``.

        Raises:
            ValueError: If ``keep`` or ``best_mode`` is something else.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} would keep no checkpoint. Use 1 or more.")
        if best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={best_mode!r} must be 'min' or 'max'.")
        self.directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self._best_metric = best_metric
        self._best_mode = best_mode
        self._manager: ocp.CheckpointManager | None = None
        self._is_writer = False
        self._saving: int | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, the oldest first."""
        manager = self._open_for_reading()
        return [] if manager is None else sorted(manager.all_steps())

    def latest_step(self) -> int | None:
        """Returns the newest step, or None if there is no checkpoint."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step that is best by the metric, None if no step has it."""
        manager = self._open_for_reading()
        step = None if manager is None else manager.best_step()
        if manager is None or step is None:
            return None
        metrics = manager.metrics(step) or {}
        return step if self._best_metric in metrics else None

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        extra: dict[str, Any],
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Starts to save; returns once ``state`` may be changed or donated.

        A step that is already saved is left as it is.

        Args:
            step: Number of the checkpoint.
            state: Arrays, on any layout.
            extra: What else the run needs to go on, as JSON: config, data position.
            metrics: Of the validation at this step, to choose the best checkpoint.
                None if there was none.

        Raises:
            CheckpointError: If the directory cannot be written, or if this or the
                *previous* save failed. The half-written checkpoint is gone then.
            TypeError: If ``extra`` is not JSON.
        """
        _check_json(extra)
        self.wait()
        self._saving = step
        with self._report_failed_save():
            manager = self._open_for_writing()
            if step in manager.all_steps():
                return
            sums = dict(
                zip(tree_difference.paths(state), _checksums(state), strict=True)
            )
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state),
                    extra=ocp.args.JsonSave(extra),
                    checksums=ocp.args.JsonSave(sums),
                ),
                # An empty dict, since Orbax warns of steps without metrics.
                metrics=metrics or {},
            )

    def wait(self) -> None:
        """Waits until the last save is complete.

        Raises:
            CheckpointError: If it failed. The half-written checkpoint is gone then.
        """
        if self._manager is not None and self._is_writer:
            with self._report_failed_save():
                self._manager.wait_until_finished()
        self._saving = None

    def close(self) -> None:
        """Waits for the last save, as `wait` does, and frees the threads."""
        try:
            self.wait()
        finally:
            self._discard_manager()

    def restore(
        self,
        abstract_state: PyTree,
        step: int | None = None,
        *,
        part: str | None = None,
        allow_unused: bool = False,
    ) -> PyTree:
        """Reads a state straight onto the given layout, each device its own part.

        Args:
            abstract_state: `jax.ShapeDtypeStruct` with a sharding for each array. Any
                layout will do; structure, shapes and dtypes must be those saved.
            step: Which checkpoint. None for the latest.
            part: Field of the saved state that ``abstract_state`` describes, such as
                ``"params"``; nothing else is read. None for the whole.
            allow_unused: Whether there may be more in it, which is not read either.

        Returns:
            The structure of ``abstract_state``, with arrays.

        Raises:
            CheckpointError: If there is no checkpoint, it does not fit
                ``abstract_state`` (every difference is listed), or it is damaged.
            ValueError: If a leaf of ``abstract_state`` has no sharding.
        """
        _check_shardings(abstract_state)
        step, manager = self._find(step)
        wanted = abstract_state if part is None else {part: abstract_state}
        with self._report_unreadable(step):
            saved = manager.item_metadata(step)["state"]
            if saved is None:
                raise OSError("it says nothing of the arrays it holds")
            tree = saved.tree if part is None else {part: saved.tree[part]}
            tree = _common(tree, wanted) if allow_unused else tree
            if lines := tree_difference.describe(tree, wanted):
                raise CheckpointError(
                    f"The checkpoint of step {step} in '{self.directory}' is of "
                    "another model or optimizer:\n"
                    + "\n".join(lines)
                    + "\nUse the config it was saved with, or another directory."
                )
            sums = self._read_json(step, "checksums")
            restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
            only = ocp.args.PyTreeRestore(
                wanted, restore_args=restore_args, partial_restore=part is not None
            )
            composite = ocp.args.Composite(state=only)
            state = manager.restore(step, args=composite)["state"]
            pairs = zip(tree_difference.paths(state), _checksums(state), strict=True)
            damaged = [path for path, total in pairs if sums[path] != total]
            if damaged:
                raise OSError(f"the values of {shorten(damaged)} changed on disk")
        return state if part is None else state[part]

    def read_shapes(self, step: int | None = None, *, part: str) -> PyTree:
        """Returns shapes and dtypes of a field of a saved state; see `restore`."""
        step, manager = self._find(step)
        with self._report_unreadable(step):
            saved = manager.item_metadata(step)["state"]
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
                saved.tree[part],
            )

    def read_extra(self, step: int | None = None) -> dict[str, Any]:
        """Returns what `save` was given as ``extra``.

        Args:
            step: Which checkpoint. None for the latest.

        Raises:
            CheckpointError: If there is no checkpoint, or it is damaged.
        """
        step, _ = self._find(step)
        with self._report_unreadable(step):
            return self._read_json(step, "extra")

    def _read_json(self, step: int, item: str) -> dict[str, Any]:
        assert self._manager is not None
        composite = ocp.args.Composite(**{item: ocp.args.JsonRestore()})
        return self._manager.restore(step, args=composite)[item]

    def _find(self, step: int | None) -> tuple[int, ocp.CheckpointManager]:
        """Returns the step to read, the latest for None, and its reader."""
        manager = self._open_for_reading()
        steps = self.steps()
        if manager is None or not steps:
            raise CheckpointError(describe_absence(self.directory))
        if step is not None and step not in steps:
            raise CheckpointError(
                f"'{self.directory}' has no checkpoint of step {step}. "
                f"It has {', '.join(map(str, steps))}."
            )
        return steps[-1] if step is None else step, manager

    def _open_for_reading(self) -> ocp.CheckpointManager | None:
        """Returns what reads the directory, or None if there is no directory."""
        self.wait()
        if self._manager is None and self._directory_exists():
            self._open()
        return self._manager

    def _directory_exists(self) -> bool:
        """Returns what the first process sees: it may soon create the directory."""
        exists = self.directory.is_dir()
        if jax.process_count() == 1:
            return exists
        return bool(multihost_utils.broadcast_one_to_all(np.array(exists)))

    def _open_for_writing(self) -> ocp.CheckpointManager:
        """Creates the directory and removes what killed saves left in it."""
        if not self._is_writer:
            self._discard_manager()
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
            self._open(create=True, cleanup_tmp_directories=True)
            self._is_writer = True
        assert self._manager is not None
        return self._manager

    def _open(self, **options: bool) -> None:
        worst = math.inf if self._best_mode == "min" else -math.inf

        def get_metric(metrics: dict[str, float]) -> float:
            value = metrics.get(self._best_metric, worst)
            return worst if math.isnan(value) else value

        best = preservation_policy.BestN(
            get_metric_fn=get_metric, reverse=self._best_mode == "min", n=1
        )
        latest = preservation_policy.LatestN(self._keep)
        policy = preservation_policy.AnyPreservationPolicy([latest, best])
        quiet.silence_orbax()
        with self._report_unreadable(None):
            self._manager = ocp.CheckpointManager(
                self.directory,
                # Compression saves a fifth of the bytes and takes ten times as long.
                item_handlers={
                    "state": ocp.PyTreeCheckpointHandler(use_compression=False),
                    "extra": ocp.JsonCheckpointHandler(),
                    "checksums": ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policy,
                    best_fn=get_metric,
                    best_mode=self._best_mode,
                    **({"create": False} | options),
                ),
            )

    def _discard_manager(self) -> None:
        manager, self._manager, self._is_writer = self._manager, None, False
        if manager is not None:
            manager.close()

    @contextlib.contextmanager
    def _report_failed_save(self) -> Iterator[None]:
        """Turns what Orbax raises into a CheckpointError; removes what is left."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and its storage raise many classes
            step, self._saving = self._saving, None
            steps = self._clean_up(step)
            latest = f"the latest is step {steps[-1]}" if steps else "there are none"
            raise CheckpointError(
                f"Saving the checkpoint of step {step} in '{self.directory}' failed: "
                f"{reason(error)}.\n"
                f"Complete checkpoints stay loadable, {latest}; what was half-written "
                "is removed.\nMake the directory writable and free some space, or use "
                "another one."
            ) from error

    def _clean_up(self, step: int | None) -> list[int]:
        """Removes what is left of a save, as far as possible; returns the steps."""
        # The failure that brought us here is reported, not those that follow from it.
        with contextlib.suppress(Exception):
            self._discard_manager()
        if jax.process_index() == 0:
            for path in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(Exception):
            return self.steps()
        return []

    @contextlib.contextmanager
    def _report_unreadable(self, step: int | None) -> Iterator[None]:
        """Turns what Orbax raises on a damaged checkpoint into a CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and its storage raise many classes
            where = self.directory if step is None else self.directory / str(step)
            earlier = [] if step is None else [s for s in self.steps() if s < step]
            remedy = f" to resume from step {earlier[-1]}" if earlier else ""
            raise CheckpointError(
                f"'{where}' is damaged or was not written by this program: "
                f"{reason(error)}.\nRestore it from a copy, or remove it{remedy}."
            ) from error


def _checksums(state: PyTree) -> list[int]:
    return checksum.checksums(jax.tree.leaves(state))


def _common(tree: PyTree, other: PyTree) -> PyTree:
    """Returns the part of nested dicts that the other has too."""
    if not isinstance(tree, dict):
        return tree
    return {name: _common(tree[name], other[name]) for name in tree if name in other}


def _check_json(extra: dict[str, Any]) -> None:
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"extra of a checkpoint must be JSON (None, numbers, strings, lists, "
            f"dicts), but it is {extra!r}: {error}."
        ) from error


def _check_shardings(abstract_state: PyTree) -> None:
    leaves = jax.tree.leaves(abstract_state)
    pairs = zip(tree_difference.paths(abstract_state), leaves, strict=True)
    missing = [path for path, leaf in pairs if leaf.sharding is None]
    if missing:
        raise ValueError(
            "abstract_state says for each array where it shall be, but these have no "
            f"sharding: {shorten(missing)}. Use "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
        )
