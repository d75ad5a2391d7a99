"""Plans to look at: which collectives a conversion runs, along what, and the bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sbp.assemble import fit
from sbp.boxing import Step, route
from sbp.placement import Placement
from sbp.signature import Signature, SignatureLike, short
from sbp.tiling import from_signature
from sbp.transfer import places_of, plan_transfer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps of one conversion; ``print`` shows them as a table.

    Attributes:
        source: Signature that the tensor has.
        target: Signature that it should have.
        shape: Its global shape.
        dtype: Name of its dtype.
        steps: The moves, in order; none if there is nothing to do.
    """

    source: Signature
    target: Signature
    shape: tuple[int, ...]
    dtype: str
    steps: tuple[Step, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that the busiest device receives over all steps."""
        return sum(step.num_bytes for step in self.steps)

    @property
    def collectives(self) -> tuple[str, ...]:
        """Names of the collectives that the program contains, in order."""
        return tuple(
            name
            for step in self.steps
            for name in [step.collective] * step.num_messages
        )

    def __str__(self) -> str:
        head = (
            f"{self.dtype}{list(self.shape)}: {short(self.source)} -> "
            f"{short(self.target)}, {self.num_bytes} bytes per device"
        )
        rows = [
            (step.collective, ", ".join(step.axes), str(step.target), step.num_bytes)
            for step in self.steps
        ]
        lines = [f"  {c:<18}  {a:<12}  -> {t:<28}  {b:>10}" for c, a, t, b in rows]
        return "\n".join([head, *(line.rstrip() for line in lines)])


def plan(
    source: SignatureLike,
    target: SignatureLike,
    shape: Sequence[int],
    dtype: Any,
    placement: Placement,
    *,
    target_placement: Placement | None = None,
) -> Plan:
    """Returns what ``to_global`` would do to a tensor. Moves nothing.

    Args:
        source: Signature that the tensor has.
        target: Signature that it should have.
        shape: Its global shape.
        dtype: Its dtype.
        placement: Its placement.
        target_placement: Placement that it should have; None keeps it.

    Returns:
        The plan, with its steps and the bytes of each.

    Raises:
        ValueError: If a signature does not fit the placement or the shape.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [0, 1, 2, 3], ("tensor",))
        >>> print(sbp.plan(sbp.partial_sum, sbp.split(0), (8, 16), "float32", p))
        float32[8, 16]: P -> S(0), 384 bytes per device
          reduce-scatter      tensor        -> S(0) on tensor                       384
    """
    shape, dtype = tuple(shape), np.dtype(dtype)
    there = placement if target_placement is None else target_placement
    like = jax.ShapeDtypeStruct(shape, dtype)
    ends = [
        fit(sbp, end.axis_names, end.axis_sizes, like)
        for sbp, end in ((source, placement), (target, there))
    ]
    tilings = [
        from_signature(signature, end.axis_names, len(shape))
        for signature, end in zip(ends, (placement, there), strict=True)
    ]
    if there == placement:
        axes = tuple(placement.axis_sizes.items())
        steps = route(*tilings, shape, dtype.itemsize, axes)
    else:
        place, there_place = places_of(placement.mesh, there.mesh)
        steps = plan_transfer(
            tilings[0], place, tilings[1], there_place, shape, dtype.itemsize
        )
    return Plan(
        source=ends[0], target=ends[1], shape=shape, dtype=dtype.name, steps=steps
    )
