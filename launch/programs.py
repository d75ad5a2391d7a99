"""The compiled training steps of a run: one for each batch size, when it is needed."""

import dataclasses
from typing import Any

from launch.hardware import Peak
from launch.job import Job
from launch.metrics import StepCost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The training step of one batch size.

    Attributes:
        job: The run, as if all its steps were of this size.
        run: The compiled step.
        cost: Of a step, for its rates.
    """

    job: Job
    run: Any
    cost: StepCost


class Programs:
    """The training steps of a run."""

    def __init__(self, job: Job, peak: Peak):
        """Compiles nothing yet.

        Args:
            job: The run.
            peak: Of all devices together.
        """
        self._job, self._peak = job, peak
        self._sizes = job.config.batch_sizes
        self._made: dict[int, Program] = {}

    def at(self, step: int) -> Program:
        """Returns the program of a step, numbered from 1; compiles it if it is new."""
        size = self._sizes.size_at(step - 1)
        if size not in self._made:
            job = self._job
            if size != job.config.train.global_batch_size:
                job = job.at_batch_size(size)
            self._made[size] = Program(
                job=job, run=job.compile_train_step(), cost=job.cost(self._peak)
            )
        return self._made[size]

    def is_last_of_its_size(self, step: int) -> bool:
        """Returns whether the step after this one has a larger batch."""
        return self._sizes.size_at(step) != self._sizes.size_at(step - 1)
