"""The training loop: steps, and what happens between them.

The host runs ahead of the devices. It waits for them only after steps that are logged,
and then looks at the losses of all steps since the last one: a loss that is not finite
is found, with its step, before anything of it is saved.
"""

import dataclasses
import math

import jax
import numpy as np

from launch import families, hardware
from launch.checkpoint import Checkpointer
from launch.job import Job
from launch.metrics import MetricLogger, StepCost, StepTimer
from launch.programs import Programs
from launch.signals import StopRequest
from launch.state import TrainState
from launch.step import EvalStep, Metrics, objective


class DivergenceError(Exception):
    """A loss or gradient is not finite; nothing of it was saved."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A run through the training steps.

    Attributes:
        job: What is run.
        programs: The compiled steps.
        eval_step: The compiled evaluation step.
        checkpointer: Where to save.
        logger: Where to report.
        stop: Whether to stop early.
    """

    job: Job
    programs: Programs
    eval_step: EvalStep
    checkpointer: Checkpointer
    logger: MetricLogger
    stop: StopRequest

    def run(self, state: TrainState) -> TrainState:
        """Trains from the step of ``state`` to the last one, or until told to stop.

        At the end the state has been evaluated, unless the run was told to stop, and
        saved.

        Raises:
            DivergenceError: If a loss or the norm of a gradient is not finite.
            CheckpointError: If a checkpoint cannot be written.
            OSError: If the metrics cannot be written.
        """
        config = self.job.config
        first = int(state.step)
        batches = self.job.data.train_batches(first)
        program = self.programs.at(first + 1)
        timer, pending = StepTimer(), {}
        try:
            for step in range(first + 1, config.train.num_steps + 1):
                batch = program.job.to_device(next(batches))
                state, pending[step] = program.run(state, batch)
                self.logger.tick(step)
                is_due = self._is_due(step)
                # Several processes must agree, which takes a collective.
                is_asked = is_due or jax.process_count() == 1
                is_stopping = is_asked and self.stop.is_requested_anywhere()
                if is_due or is_stopping:
                    self._log(pending, timer, program.cost)
                    with timer.paused():
                        self._evaluate_and_save(state, step, is_stopping=is_stopping)
                if is_stopping or step == config.train.num_steps:
                    break
                if self.programs.is_last_of_its_size(step):
                    with timer.paused():
                        program = self.programs.at(step + 1)
        finally:
            batches.close()
        self.checkpointer.wait()
        return state

    def _is_due(self, step: int) -> bool:
        config = self.job.config
        periods = (
            config.train.log_every,
            config.eval.every_steps,
            config.checkpoint.every_steps,
        )
        is_edge = step in (1, config.train.num_steps)
        # So that what is logged together was of one size.
        is_edge |= self.programs.is_last_of_its_size(step)
        return is_edge or any(period and step % period == 0 for period in periods)

    def _log(
        self, pending: dict[int, Metrics], timer: StepTimer, cost: StepCost
    ) -> None:
        """Waits for the steps since the last call, checks them and reports the last."""
        num_steps = len(pending)
        seconds = timer.lap(num_steps, after=pending)
        fetched = jax.device_get(pending)
        pending.clear()
        for step, metrics in fetched.items():
            is_finite = all(math.isfinite(metrics[n]) for n in ("loss", "grad_norm"))
            if not is_finite and not metrics.get("is_skipped", False):
                raise DivergenceError(self._describe_divergence(step, metrics))
        step, metrics = max(fetched.items())
        size = {}
        if self.job.config.train.rampup_batch_size is not None:
            size = {"global_batch_size": cost.num_samples}
        self.logger.write(step, metrics | size | cost.rates(seconds) | _memory())

    def _evaluate_and_save(
        self, state: TrainState, step: int, *, is_stopping: bool
    ) -> None:
        config = self.job.config
        is_last = step == config.train.num_steps
        every, metrics = config.eval.every_steps, None
        if is_last or (every and step % every == 0 and not is_stopping):
            metrics = evaluate(self.job, self.eval_step, state)
            if metrics:
                self.logger.write_eval(step, metrics)
        every = config.checkpoint.every_steps
        if is_last or is_stopping or (every and step % every == 0):
            self.checkpointer.save(
                step,
                self.job.saved_form.to_saved(state),
                extra=self.job.extra(step),
                metrics=metrics or None,
            )

    def _describe_divergence(self, step: int, metrics: Metrics) -> str:
        saved = self.checkpointer.latest_step()
        kept = (
            "there is no checkpoint to go back to"
            if saved is None
            else f"the checkpoint of step {saved} is kept, and --resume goes on from it"
        )
        scale = ""
        if "loss_scale" in metrics:
            scale = f", at the lowest loss scale {metrics['loss_scale']:g}"
        return (
            f"The training diverged at step {step}: loss {metrics['loss']}, gradient"
            f" norm {metrics['grad_norm']}{scale}. The run has stopped; {kept}. Lower"
            " optim.learning_rate, lengthen optim.warmup_steps, or set"
            " optim.grad_clip_norm."
        )


def evaluate(job: Job, eval_step: EvalStep, state: TrainState) -> dict[str, float]:
    """Returns losses, accuracies and the like on the held-out split, {} if it is empty.

    All are made of sums over the split, so the batch size does not change them.

    Args:
        job: What is run.
        eval_step: Its evaluation step.
        state: Whose parameters to use.
    """
    batches = job.data.validation_batches(job.config.eval.num_batches)
    found = [eval_step(state.params, job.to_device(batch)) for batch in batches]
    if not found:
        return {}
    # In float64: a single precision one stops to count at 2**24.
    sums, counts = jax.tree.map(
        lambda *parts: sum(np.asarray(part, np.float64) for part in parts),
        *jax.device_get(found),
    )
    means = {name: float(sums[name] / counts[name]) for name in counts}
    scores = families.FAMILIES[job.config.model_name].scores(means, sums)
    return {"loss": objective(means), **means, **scores}


def _memory() -> dict[str, int]:
    return {"peak_memory_bytes": hardware.peak_memory_bytes()}
