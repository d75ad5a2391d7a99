"""What the deduction works on: a region as it is cut so far, and plans for an axis."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from sbp.deduction.region import Region, Value
from sbp.rules.form import Rule, Shape, Use
from sbp.signature import Component, Split


class MeshAxis(NamedTuple):
    """A mesh axis, and the number of devices along it."""

    name: str
    size: int


class AddUp(enum.Enum):
    """Asks for a result as it comes, but with partial sums added up."""

    ADD_UP = "add up"


ADD_UP = AddUp.ADD_UP
Wanted = Sequence[Component | AddUp | None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LocalRegion:
    """A region as the devices see it once some axes are decided.

    Attributes:
        region: The region.
        values: Its values, cut by the axes decided so far.
        uses: What the rules of each operation depend on, cut likewise.
        bodies: For each operation its bodies or branches.
    """

    region: Region
    values: tuple[Value, ...]
    uses: tuple[Use, ...]
    bodies: tuple[tuple["LocalRegion", ...], ...]

    @classmethod
    def whole(cls, region: Region) -> "LocalRegion":
        """Returns the region before any axis is decided."""
        bodies = tuple(
            tuple(cls.whole(body) for body in operation.regions)
            for operation in region.operations
        )
        return cls(region, region.values, region.uses, bodies)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AxisPlan:
    """The decisions for a region on one axis.

    Attributes:
        rules: The rule of each operation.
        bodies: For each operation the plans of its bodies.
        produced: The component that each value has when it is made.
        outputs: The component in which each result is returned.
        cost: Bytes moved, and one for each collective.
    """

    rules: tuple[Rule, ...]
    bodies: tuple[tuple["AxisPlan", ...], ...]
    produced: tuple[Component, ...]
    outputs: tuple[Component, ...]
    cost: int


def apply_axis(local: LocalRegion, plan: AxisPlan, num_shards: int) -> LocalRegion:
    """Returns the region as seen by the axes after the one that ``plan`` decided."""
    values = tuple(
        dataclasses.replace(value, shape=_cut(value.shape, component, num_shards))
        for value, component in zip(local.values, plan.produced, strict=True)
    )
    uses = tuple(
        dataclasses.replace(
            use,
            shapes=_cut_all(use.shapes, rule.inputs, num_shards),
            outputs=_cut_all(use.outputs, rule.outputs, num_shards),
        )
        for use, rule in zip(local.uses, plan.rules, strict=True)
    )
    bodies = tuple(
        tuple(apply_axis(b, p, num_shards) for b, p in zip(bs, ps, strict=True))
        for bs, ps in zip(local.bodies, plan.bodies, strict=True)
    )
    return LocalRegion(local.region, values, uses, bodies)


def _cut(shape: Shape, component: Component, num_shards: int) -> Shape:
    if not isinstance(component, Split):
        return shape
    dim = component.dim
    return (*shape[:dim], shape[dim] // num_shards, *shape[dim + 1 :])


def _cut_all(
    shapes: Sequence[Shape], components: Sequence[Component], num_shards: int
) -> tuple[Shape, ...]:
    pairs = zip(shapes, components, strict=True)
    return tuple(_cut(shape, component, num_shards) for shape, component in pairs)
