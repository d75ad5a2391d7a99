"""Programs: the decisions of all mesh axes for a region, with every conversion.

A program is data. `sbp.deduction.execute` runs it, `sbp.explain` shows it: what is
shown is what runs.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from sbp import boxing, cost
from sbp.deduction.axis import deduce
from sbp.deduction.local import AxisPlan, LocalRegion, MeshAxis, Wanted, apply_axis
from sbp.deduction.region import BARRIER, CONSTRAINT, Operation, Region, Value
from sbp.rules import has_form
from sbp.rules.form import Shape
from sbp.signature import Signature, broadcast
from sbp.spec import local_shape
from sbp.tiling import Axes, from_signature


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """A value gets another signature.

    Attributes:
        value: Number of the value.
        source: Signature that it has.
        target: Signature that it gets, in addition.
        steps: The collectives and local moves that do it.
    """

    value: int
    source: Signature
    target: Signature
    steps: tuple[boxing.Step, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Combine:
    """A collective inside an operation, as of a maximum over a split dim.

    Attributes:
        kind: ``"max"``, ``"min"``, ``"any"`` or ``"all"``.
        axes: Mesh axes over which the devices' results are combined.
        num_bytes: Bytes that each device receives.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One operation on the devices.

    Attributes:
        operation: What to compute.
        inputs: Signature of each operand.
        outputs: Signature of each result.
        shapes: Shape of each result on a device.
        conversions: What has to be converted first.
        combines: Collectives inside the operation.
        bodies: Programs of a loop's body or a condition's branches.
    """

    operation: Operation
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    shapes: tuple[Shape, ...]
    conversions: tuple[Conversion, ...]
    combines: tuple[Combine, ...]
    bodies: tuple["Program", ...]

    @property
    def is_fallback(self) -> bool:
        """Whether it is computed everywhere because the table has no row for it."""
        operation = self.operation
        is_known = has_form(operation.name) or operation.regions
        return not is_known and operation.name not in (BARRIER, CONSTRAINT)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A region with a signature for every value.

    Attributes:
        region: The region.
        axes: Names and sizes of the mesh axes.
        inputs: Signature of each argument.
        outputs: Signature of each result.
        instructions: In the order of execution.
        conversions: Of results, at the end.
    """

    region: Region
    axes: Axes
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    instructions: tuple[Instruction, ...]
    conversions: tuple[Conversion, ...]


def deduce_program(
    region: Region,
    axes: Axes,
    inputs: Sequence[Signature],
    wanted: Sequence[Wanted],
) -> Program:
    """Returns the program of a region.

    Args:
        region: The region.
        axes: Names and sizes of the mesh axes.
        inputs: Signature of each argument.
        wanted: For each mesh axis what each result must be, see `deduce`.
    """
    local = LocalRegion.whole(region)
    plans = []
    for number, axis in enumerate(itertools.starmap(MeshAxis, axes)):
        given = [signature[number] for signature in inputs]
        plan = deduce(local, axis, given, wanted[number])
        plans.append(plan)
        local = apply_axis(local, plan, axis.size)
    return build_program(region, axes, plans, tuple(inputs))


def build_program(
    region: Region,
    axes: Axes,
    plans: Sequence[AxisPlan],
    inputs: tuple[Signature, ...],
) -> Program:
    """Returns the program that follows a plan for each axis.

    Args:
        region: The region.
        axes: Names and sizes of the mesh axes.
        plans: The decisions, axis by axis.
        inputs: Signature of each argument.
    """
    return _Builder(region, plans, axes).build(inputs)


class _Builder:
    """Puts the plans of all axes together, and plans the conversions."""

    def __init__(self, region: Region, plans: Sequence[AxisPlan], axes: Axes) -> None:
        self.region = region
        self.plans = plans
        self.axes = axes
        self.sizes = tuple(size for _, size in axes)
        self.everywhere = (broadcast,) * len(axes)
        self.at_hand: list[list[Signature]] = [[] for _ in region.values]

    def build(self, inputs: tuple[Signature, ...]) -> Program:
        for value in self.region.constants:
            self.at_hand[value] = [self.everywhere]
        for value, signature in zip(self.region.inputs, inputs, strict=True):
            self.at_hand[value] = [signature]
        numbers = range(len(self.region.operations))
        instructions = tuple(self._instruction(number) for number in numbers)
        outputs = _across([plan.outputs for plan in self.plans], self.region.outputs)
        conversions = self._conversions(self.region.outputs, outputs)
        return Program(
            region=self.region,
            axes=self.axes,
            inputs=inputs,
            outputs=outputs,
            instructions=instructions,
            conversions=conversions,
        )

    def _instruction(self, number: int) -> Instruction:
        operation = self.region.operations[number]
        rules = [plan.rules[number] for plan in self.plans]
        inputs = _across([rule.inputs for rule in rules], operation.inputs)
        outputs = _across([rule.outputs for rule in rules], operation.outputs)
        conversions = self._conversions(operation.inputs, inputs)
        for value, signature in zip(operation.outputs, outputs, strict=True):
            self.at_hand[value] = [signature]
        shapes = tuple(
            local_shape(signature, self.sizes, self.region.values[value].shape)
            for value, signature in zip(operation.outputs, outputs, strict=True)
        )
        bodies = tuple(
            self._body(operation, number, index, inputs)
            for index in range(len(operation.regions))
        )
        kinds = [rule.combine for rule in rules]
        return Instruction(
            operation=operation,
            inputs=inputs,
            outputs=outputs,
            shapes=shapes,
            conversions=conversions,
            combines=self._combines(kinds, operation, shapes),
            bodies=bodies,
        )

    def _body(
        self, operation: Operation, number: int, index: int, given: Sequence[Signature]
    ) -> Program:
        body = operation.regions[index]
        plans = [plan.bodies[number][index] for plan in self.plans]
        inputs = _across(
            [[plan.produced[v] for v in body.inputs] for plan in plans], body.inputs
        )
        return build_program(body, self.axes, plans, inputs)

    def _conversions(
        self, values: Sequence[int], signatures: Sequence[Signature]
    ) -> tuple[Conversion, ...]:
        conversions = []
        for value, target in zip(values, signatures, strict=True):
            if target in self.at_hand[value]:
                continue
            routes = [self._convert(value, s, target) for s in self.at_hand[value]]
            conversions.append(min(routes, key=_price))
            self.at_hand[value].append(target)
        return tuple(conversions)

    def _convert(self, value: int, source: Signature, target: Signature) -> Conversion:
        steps = route(self.region.values[value], source, target, self.axes)
        return Conversion(value, source, target, steps)

    def _combines(
        self, kinds: Sequence[str], operation: Operation, shapes: Sequence[Shape]
    ) -> tuple[Combine, ...]:
        names = tuple(
            name for kind, (name, _) in zip(kinds, self.axes, strict=True) if kind
        )
        if not names:
            return ()
        kind = next(filter(None, kinds))
        num_devices = math.prod(dict(self.axes)[name] for name in names)
        sizes = [
            cost.size_bytes(shape, self.region.values[value].itemsize)
            for shape, value in zip(shapes, operation.outputs, strict=True)
        ]
        moved = sum(cost.all_reduce_bytes(size, num_devices) for size in sizes)
        return (Combine(kind, names, moved),)


def route(
    value: Value, source: Signature, target: Signature, axes: Axes
) -> tuple[boxing.Step, ...]:
    """Returns the cheapest steps from one signature of a value to another."""
    names, ndim = [name for name, _ in axes], len(value.shape)
    tilings = (from_signature(s, names, ndim) for s in (source, target))
    return boxing.route(*tilings, value.shape, value.itemsize, axes)


def _price(conversion: Conversion) -> tuple[int, int]:
    steps = conversion.steps
    return sum(s.num_bytes for s in steps), sum(s.num_messages for s in steps)


def _across(
    of_axes: Sequence[Sequence], values: Sequence[int]
) -> tuple[Signature, ...]:
    """Turns components per axis into a signature per value."""
    if not of_axes:
        return ((),) * len(values)
    return tuple(zip(*of_axes, strict=True)) if values else ()
