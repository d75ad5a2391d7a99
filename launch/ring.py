"""Devices in a ring that share a sequence: who holds what, who sends to whom.

A device holds one part of the sequence, or two if a query sees nothing after it: the
parts ``r`` and ``2 * size - 1 - r`` on rank ``r``.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from launch.partial_attention import PLAIN, PartialAttention
from launch.passing import PASS_ON, Passing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Devices along a manual mesh axis, among which a sequence is spread.

    Attributes:
        axis_name: The axis.
        size: Its devices, two or more.
        attention: How a pair of parts is computed.
        passing: How keys and values get from rank to rank.
        head_axis: An axis left to XLA, over which heads are split; None if there is
            none.
    """

    axis_name: str
    size: int
    attention: PartialAttention = PLAIN
    passing: Passing = PASS_ON
    head_axis: str | None = None

    def part_order(self, *, is_causal: bool) -> list[int]:
        """Returns the parts of the sequence, device after device.

        Example:
            >>> ring = Ring(axis_name="context", size=3)
            >>> ring.part_order(is_causal=True), ring.part_order(is_causal=False)
            ([0, 5, 1, 4, 2, 3], [0, 1, 2])
        """
        numbers = range(num_parts(is_causal=is_causal))
        return [self.part(rank, i) for rank in range(self.size) for i in numbers]

    def part(self, rank: Any, number: Any) -> Any:
        """Returns which part of the sequence is a rank's first (0) or second (1)."""
        return rank + number * (2 * self.size - 1 - 2 * rank)

    def per_heads(self, run: Callable, arguments: Sequence, *, num_whole: int) -> Any:
        """Returns what a function returns, run for the heads of each device alone.

        Args:
            run: Of arguments with heads as dim 2; all its results have them there too.
            arguments: The last ones have no heads.
            num_whole: How many of them.
        """
        if self.head_axis is None:
            return run(*arguments)
        heads = P(None, None, self.head_axis)
        in_specs = [heads] * (len(arguments) - num_whole) + [P()] * num_whole
        mesh = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            run,
            mesh=mesh,
            # Axes of one device as well: cuDNN leaves XLA nothing to split.
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
            in_specs=tuple(in_specs),
            out_specs=heads,
        )(*arguments)


def num_parts(*, is_causal: bool) -> int:
    """Returns how many parts of the sequence a device holds."""
    return 2 if is_causal else 1
