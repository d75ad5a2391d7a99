"""Batch sizes that grow in the course of a training, as in Megatron.

Small batches make more of the first samples, when gradients all point the same way.
"""

import bisect
import dataclasses
from collections.abc import Iterator

RampUp = tuple[int, int, int]
"""First size, increment, and the samples over which the size grows to the last one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Steps of the same batch size.

    Attributes:
        first_step: Steps done before, of the whole training.
        first_sample: Samples seen before.
        size: Samples of each batch.
    """

    first_step: int
    first_sample: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSizes:
    """The global batch size of each step. `build` makes it.

    Attributes:
        phases: In order; the last one has no end.
    """

    phases: tuple[Phase, ...]

    def size_at(self, step: int) -> int:
        """Returns the size of the batch that ``step`` steps come before."""
        return self._phase(step).size

    def samples_before(self, step: int) -> int:
        """Returns the samples of the first ``step`` steps together."""
        phase = self._phase(step)
        return phase.first_sample + (step - phase.first_step) * phase.size

    def _phase(self, step: int) -> Phase:
        starts = [phase.first_step for phase in self.phases]
        return self.phases[bisect.bisect_right(starts, step) - 1]


def build(rampup: RampUp | None, global_batch_size: int) -> BatchSizes:
    """Returns the sizes of a training.

    With n increments from the first size to the last one, the size grows after each
    n-th part of the samples, at the end of the step that completes it.

    Args:
        rampup: See `RampUp`; None for the same size all the time.
        global_batch_size: The last size.

    Example:
        >>> sizes = build((2, 2, 10), 6)
        >>> [(sizes.size_at(step), sizes.samples_before(step)) for step in range(7)]
        [(2, 0), (2, 2), (2, 4), (4, 6), (6, 10), (6, 16), (6, 22)]
    """
    if rampup is None:
        return BatchSizes((Phase(0, 0, global_batch_size),))
    first, increment, num_samples = rampup
    sizes = range(first, global_batch_size, increment)
    phases, step, sample = [], 0, 0
    for number, size in enumerate(sizes, start=1):
        phases.append(Phase(step, sample, size))
        end = -(-num_samples * number // len(sizes))
        num_steps = max(0, -(-(end - sample) // size))
        step, sample = step + num_steps, sample + num_steps * size
    phases.append(Phase(step, sample, global_batch_size))
    return BatchSizes(tuple(phases))


def broken_rules(
    rampup: RampUp | None, global_batch_size: int, *, multiple: int
) -> Iterator[str]:
    """Yields one sentence per broken rule.

    Args:
        rampup: See `build`.
        global_batch_size: See `build`.
        multiple: Samples of a microbatch on all data-parallel ranks.
    """
    if rampup is None:
        return
    first, increment, num_samples = rampup
    name = f"train.rampup_batch_size={rampup}"
    if min(rampup) < 1:
        yield f"{name} must be three numbers of at least 1. Use None for no ramp-up."
    elif first >= global_batch_size:
        yield (
            f"{name} begins with {first}, which is not below"
            f" train.global_batch_size={global_batch_size}. Begin with less, or use"
            " None."
        )
    elif (global_batch_size - first) % increment:
        yield (
            f"{name} does not lead from {first} to"
            f" train.global_batch_size={global_batch_size} in steps of {increment}."
            f" Use an increment that divides {global_batch_size - first}."
        )
    elif first % multiple or increment % multiple:
        yield (
            f"{name}: {first} and {increment} must be multiples of {multiple}, the"
            " samples of a microbatch on all data-parallel ranks. Round them, or use"
            " smaller microbatches: raise train.num_microbatches."
        )
