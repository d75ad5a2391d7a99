"""The named schedules: each computes the tick of every task, `build` picks one.

All are laid out so that a step in ticks takes no longer than the same schedule with
stages that wait for their inputs alone. A microbatch moves one piece per tick in either
direction, so that nothing received ever waits, except for the second phase of gpipe.
"""

import difflib
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sbp.pipeline.schedule import Kind, Schedule, Task, from_ticks


def build(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    head_delay: int = 0,
) -> Schedule:
    """Builds the schedule called ``name``, one of :data:`SCHEDULES`.

    Args:
        name: 'gpipe', '1f1b', 'interleaved_1f1b', 'zero_bubble' or 'forward_only'.
        num_stages: Stages of the pipeline; 1 is plain gradient accumulation.
        num_microbatches: Microbatches of one step.
        num_chunks: Pieces of the model per stage; more than one for
            'interleaved_1f1b', and for the 'forward_only' that goes with it.
        head_delay: 0 if the last stage computes head and loss within its backward
            task, 1 if all stages compute them together, one tick before it.

    Returns:
        A schedule that satisfies `validate`.

    Raises:
        ValueError: If the name is unknown, a size is less than 1, or the schedule
            cannot run with these sizes.

    Example:
        >>> schedule = build("1f1b", num_stages=4, num_microbatches=8)
        >>> schedule.num_ticks
        14
        >>> for task in schedule.ticks[4][3]:
        ...     print(task)
        forward of microbatch 1 on stage 3, chunk 0
        backward of microbatch 1 on stage 3, chunk 0
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else "Choose one of these."
        raise ValueError(
            f"There is no schedule '{name}'; there are {', '.join(SCHEDULES)}. {hint}"
        )
    return SCHEDULES[name](
        num_stages, num_microbatches, num_chunks=num_chunks, head_delay=head_delay
    )


def gpipe(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    head_delay: int = 0,
) -> Schedule:
    """All forward tasks, then all backward tasks (arXiv:1811.06965).

    The simplest order, and the one that keeps every microbatch's stage input until
    the second phase. Microbatches go backward in the order they went forward, so that
    gradients add up in the same order under every schedule. Takes any number of
    microbatches, one chunk.
    """
    sizes = _Sizes("gpipe", num_stages, num_microbatches, num_chunks, head_delay)
    _check(sizes, _one_chunk(sizes))
    second_phase = num_microbatches + num_stages - 1
    return sizes.schedule(
        _forward_ticks(sizes) | _backward_ticks(sizes, start=second_phase)
    )


def one_f_one_b(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    head_delay: int = 0,
) -> Schedule:
    """One forward, one backward: a microbatch returns as soon as it can.

    PipeDream-Flush (arXiv:2006.09503) with a forward and a backward slot in each tick:
    stage ``s`` forwards microbatch ``tick - s`` and backwards microbatch
    ``tick - (2 * (num_stages - 1) - s) - head_delay``. At most
    ``2 * (num_stages - s) - 1 + head_delay`` stage inputs are alive on stage ``s``,
    however many microbatches there are. Needs a microbatch per stage, one chunk.
    """
    sizes = _Sizes("1f1b", num_stages, num_microbatches, num_chunks, head_delay)
    _check(sizes, _one_chunk(sizes), _microbatch_per_stage(sizes))
    return sizes.schedule(_forward_ticks(sizes) | _backward_ticks(sizes))


def interleaved_1f1b(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    head_delay: int = 0,
) -> Schedule:
    """1F1B with several chunks per stage (arXiv:2104.04473, section 2.2).

    Filling the pipeline takes chunks instead of whole stages, which divides the bubble
    by ``num_chunks``; there are ``num_chunks`` times as many ticks, each with its
    transfer. Microbatches travel in groups of ``num_stages``, which must therefore
    divide their number: within a group each stage runs chunk 0 of all, then chunk 1.
    """
    sizes = _Sizes(
        "interleaved_1f1b", num_stages, num_microbatches, num_chunks, head_delay
    )
    _check(sizes, _several_chunks(sizes), _whole_groups(sizes))
    return sizes.schedule(_forward_ticks(sizes) | _backward_ticks(sizes))


def zero_bubble(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    head_delay: int = 0,
) -> Schedule:
    """1F1B whose weight gradients wait where the pipeline would (arXiv:2401.10241).

    Forward and input-gradient tasks run at the ticks of 1F1B. The weight gradient of a
    microbatch runs with its input gradient, as one full backward task, only if the
    tick becomes no longer: because the stage has a slot to spare, or because all
    stages are busy and all take one more. Otherwise it is put aside until a tick with
    a slot to spare, at the latest until after the last input gradient. That gives the
    time of the paper's ZB-H1. Needs a microbatch per stage, one chunk.
    """
    sizes = _Sizes("zero_bubble", num_stages, num_microbatches, num_chunks, head_delay)
    _check(sizes, _one_chunk(sizes), _microbatch_per_stage(sizes))
    forward, backward = _forward_ticks(sizes), _backward_ticks(sizes)
    return sizes.schedule(forward | _delay_weight_gradients(forward, backward))


def forward_only(
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    head_delay: int = 0,
) -> Schedule:
    """The forward tasks alone: evaluation and inference.

    Takes any number of microbatches and of chunks: a model that is trained interleaved
    is evaluated where its weights lie.
    """
    sizes = _Sizes("forward_only", num_stages, num_microbatches, num_chunks, head_delay)
    _check(sizes)
    return sizes.schedule(_forward_ticks(sizes))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zero_bubble": zero_bubble,
    "forward_only": forward_only,
}
"""The schedules by name."""


class _Sizes(NamedTuple):
    """The arguments of a builder, in one value."""

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    head_delay: int

    def schedule(self, tick_of: Mapping[Task, int]) -> Schedule:
        return from_ticks(tick_of=tick_of, **self._asdict())


def _forward_ticks(sizes: _Sizes) -> dict[Task, int]:
    """A group of one microbatch per stage enters, goes round, and the next follows."""
    _, num_stages, num_microbatches, num_chunks, _ = sizes
    ticks = {}
    for microbatch in range(num_microbatches):
        group, place = divmod(microbatch, num_stages)
        for chunk, stage in itertools.product(range(num_chunks), range(num_stages)):
            turn = group * num_chunks + chunk
            task = Task(Kind.FORWARD, stage, microbatch, chunk)
            ticks[task] = turn * num_stages + place + stage
    return ticks


def _backward_ticks(sizes: _Sizes, start: int | None = None) -> dict[Task, int]:
    """The same from the last piece to the first; ``start`` is the first one's tick."""
    _, num_stages, num_microbatches, num_chunks, head_delay = sizes
    if start is None:
        start = num_stages * num_chunks - 1 + head_delay
    ticks = {}
    for microbatch in range(num_microbatches):
        group, place = divmod(microbatch, num_stages)
        for chunk, stage in itertools.product(range(num_chunks), range(num_stages)):
            turn = group * num_chunks + (num_chunks - 1 - chunk)
            task = Task(Kind.BACKWARD, stage, microbatch, chunk)
            ticks[task] = start + turn * num_stages + place + (num_stages - 1 - stage)
    return ticks


def _delay_weight_gradients(
    forward: Mapping[Task, int], backward: Mapping[Task, int]
) -> dict[Task, int]:
    """Splits full backward tasks where the weight gradient is better run later."""
    num_stages = 1 + max(task.stage for task in forward)
    num_ticks = 1 + max(backward.values())
    load = [[0] * num_stages for _ in range(num_ticks)]
    arriving: dict[tuple[int, int], int] = {}  # (tick, stage) -> microbatch
    for task, tick in itertools.chain(forward.items(), backward.items()):
        load[tick][task.stage] += 1
        if task.kind is Kind.BACKWARD:
            arriving[tick, task.stage] = task.microbatch
    ticks: dict[Task, int] = {}
    waiting: list[list[int]] = [[] for _ in range(num_stages)]
    for tick in itertools.count():
        loads = load[tick] if tick < num_ticks else [0] * num_stages
        if tick >= num_ticks and not any(waiting):
            return ticks
        # All stages equally busy with backward tasks: one more on each wastes nothing.
        full = min(loads) == max(loads) and all(
            (tick, stage) in arriving for stage in range(num_stages)
        )
        longest = max(loads) + (full or tick >= num_ticks)
        for stage in range(num_stages):
            fresh = arriving.get((tick, stage))
            spare = loads[stage] < longest
            if fresh is not None and spare:
                ticks[Task(Kind.BACKWARD, stage, fresh)] = tick
            elif fresh is not None:
                ticks[Task(Kind.BACKWARD_INPUT, stage, fresh)] = tick
                waiting[stage].append(fresh)
            elif spare and waiting[stage]:
                oldest = waiting[stage].pop(0)
                ticks[Task(Kind.BACKWARD_WEIGHT, stage, oldest)] = tick
    raise AssertionError("unreachable: every round of the loop ends or goes on")


def _check(sizes: _Sizes, *broken_rules: str) -> None:
    """Raises one error with every broken rule; an empty string is a rule kept."""
    fields = ("num_stages", "num_microbatches", "num_chunks")
    rules = [
        f"{field}={size} is less than 1. Give a positive integer."
        for field, size in zip(fields, sizes[1:4], strict=True)
        if size < 1
    ]
    if sizes.head_delay not in (0, 1):
        rules.append(
            f"head_delay={sizes.head_delay} is neither 0 nor 1. Use 0 if the last "
            "stage computes the head, 1 if all stages compute it together."
        )
    # The schedule's own rules divide by the sizes and speak of them as given.
    rules = rules or [rule for rule in broken_rules if rule]
    if rules:
        raise ValueError(f"Schedule '{sizes.name}': " + "\n  ".join(rules))


def _one_chunk(sizes: _Sizes) -> str:
    if sizes.num_chunks == 1:
        return ""
    return (
        f"num_chunks={sizes.num_chunks}, but it runs one chunk per stage. Use "
        "num_chunks=1, or the schedule 'interleaved_1f1b'."
    )


def _several_chunks(sizes: _Sizes) -> str:
    if sizes.num_chunks > 1:
        return ""
    return (
        f"num_chunks={sizes.num_chunks} leaves nothing to interleave. Use at least 2 "
        "chunks per stage, or the schedule '1f1b'."
    )


def _microbatch_per_stage(sizes: _Sizes) -> str:
    if sizes.num_microbatches >= sizes.num_stages:
        return ""
    return (
        f"num_microbatches={sizes.num_microbatches} is fewer than the "
        f"{sizes.num_stages} pipeline stages. Raise it to at least "
        f"{sizes.num_stages}, lower num_stages, or use the schedule 'gpipe'."
    )


def _whole_groups(sizes: _Sizes) -> str:
    if sizes.num_stages < 1 or sizes.num_microbatches % sizes.num_stages == 0:
        return ""
    below = sizes.num_microbatches // sizes.num_stages * sizes.num_stages
    choices = [n for n in (below, below + sizes.num_stages) if n > 0]
    return (
        f"num_microbatches={sizes.num_microbatches} is not divisible by the "
        f"{sizes.num_stages} pipeline stages, which pass them on in groups of "
        f"{sizes.num_stages}. Use {' or '.join(map(str, choices))} microbatches, or "
        "the schedule '1f1b'."
    )
