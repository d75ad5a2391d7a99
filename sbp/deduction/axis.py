"""Which rule each operation takes on one mesh axis.

Axes are decided one after another, from the first; the next sees the shapes that the
previous ones left. On one axis, operations are decided in the order of execution:

1. If operands have exactly the components of a rule, that rule is taken.
2. Otherwise the rule that moves the fewest bytes: those of converting the operands,
   and, if a result is a partial sum, those of making it a split later.
   Slicing a broadcast operand is free, so ``S(0) + B`` stays ``S(0)``.
3. At equal cost the rule that more operands match, then the order of the table.

Two conversions are never made unasked: to a split where no operand is split, and to a
partial sum unless another operand already is in parts. A partial sum is therefore
added up to broadcast where an operation needs its value, and to a split where another
operand is split. *Where* on the way from its origin it is added up is chosen
afterwards, by a minimum cut (`sbp.deduction.cut`).
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sbp import cost
from sbp.deduction import control_flow, cut
from sbp.deduction.region import BARRIER, CONSTRAINT, Operation, Region, Value
from sbp.rules import admissible_rules
from sbp.rules.form import Rule, RuleSet, Shape, Use
from sbp.signature import Broadcast, Component, PartialSum, Split, broadcast


class AddUp(enum.Enum):
    """Asks for a result as it comes, but with partial sums added up."""

    ADD_UP = "add up"


ADD_UP = AddUp.ADD_UP
Wanted = Sequence[Component | AddUp | None]


class MeshAxis(NamedTuple):
    """A mesh axis, and the number of devices along it."""

    name: str
    size: int


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


def deduce(
    local: LocalRegion, axis: MeshAxis, inputs: Sequence[Component], wanted: Wanted
) -> AxisPlan:
    """Decides one axis.

    Args:
        local: The region, cut by the axes before.
        axis: The axis.
        inputs: Component of each argument.
        wanted: Component that each result must get. None leaves it as it comes,
            ``ADD_UP`` leaves splits as they come.
    """
    rule_sets = [admissible_rules(use, axis.size) for use in local.uses]
    late = _Walk(local, axis, rule_sets, {})
    plan = late.run(inputs, wanted)
    early = cut.places_to_add_up(late.sums)
    if not early:
        return plan
    again = _Walk(local, axis, rule_sets, early).run(inputs, wanted)
    return min(plan, again, key=lambda p: p.cost)


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


def transition_cost(
    source: Component, target: Component, num_bytes: int, num_shards: int
) -> int:
    """Returns the bytes to change a component, and one for the collective.

    Args:
        source: Component before.
        target: Component after.
        num_bytes: Size of the value before this axis cuts it.
        num_shards: Devices along the axis.

    Example:
        >>> from sbp.signature import partial_sum, split
        >>> transition_cost(partial_sum, split(0), 512, 4)
        385
        >>> transition_cost(broadcast, split(0), 512, 4)
        0
    """
    if source == target or num_shards == 1 or isinstance(source, Broadcast):
        return 0
    if isinstance(source, PartialSum):
        if isinstance(target, Broadcast):
            return 1 + cost.all_reduce_bytes(num_bytes, num_shards)
        return 1 + cost.reduce_scatter_bytes(num_bytes, num_shards)
    if isinstance(target, PartialSum):
        return 0
    piece = num_bytes // num_shards
    if isinstance(target, Broadcast):
        return 1 + cost.all_gather_bytes(piece, num_shards)
    return 1 + cost.all_to_all_bytes(piece, num_shards)


class _Walk:
    """One pass over the operations of a region.

    ``versions[v]`` are the components in which value ``v`` is at hand, the one it was
    made in first. A partial sum that was added up is no longer at hand.
    """

    def __init__(
        self,
        local: LocalRegion,
        axis: MeshAxis,
        rule_sets: Sequence[RuleSet],
        early: Mapping[int, Component],
    ) -> None:
        self.local = local
        self.axis = axis
        self.num_shards = axis.size
        self.rule_sets = rule_sets
        self.early = early
        self.versions: list[list[Component]] = [[] for _ in local.values]
        self.produced: list[Component] = [broadcast] * len(local.values)
        self.cost = 0
        self.sums = cut.SumGraph()

    def run(self, inputs: Sequence[Component], wanted: Wanted) -> AxisPlan:
        region = self.local.region
        for value in region.constants:
            self.versions[value] = [broadcast]
        for value, component in zip(region.inputs, inputs, strict=True):
            self._produce(value, component)
            if isinstance(component, PartialSum):
                self.sums.add_source(value)
        rules, bodies = [], []
        for index in range(len(region.operations)):
            rule, plans = self._step(index)
            rules.append(rule)
            bodies.append(plans)
        outputs = [
            self._give(value, component)
            for value, component in zip(region.outputs, wanted, strict=True)
        ]
        return AxisPlan(
            rules=tuple(rules),
            bodies=tuple(bodies),
            produced=tuple(self.produced),
            outputs=tuple(outputs),
            cost=self.cost,
        )

    def _step(self, index: int) -> tuple[Rule, tuple[AxisPlan, ...]]:
        """Decides one operation, converts its operands and makes its results."""
        operation = self.local.region.operations[index]
        given = tuple(self.versions[v][0] for v in operation.inputs)
        plans: tuple[AxisPlan, ...] = ()
        if operation.name == BARRIER:
            rule = Rule(given, given)
        elif operation.name == CONSTRAINT:
            pinned = (_pinned(operation, self.axis.name),)
            rule = Rule(pinned, pinned)
        elif operation.regions:
            bodies, shapes = self.local.bodies[index], self.local.uses[index].shapes
            rule, plans, body_cost = control_flow.decide(
                operation, bodies, shapes, given, self.axis, deduce
            )
            self.cost += body_cost
        else:
            exact = self.rule_sets[index].exact.get(given)
            rule = exact or self._cheapest(index, given)
            self.cost += self._combine_cost(rule, operation.outputs)
        self._take(rule, operation.inputs, operation.outputs, plans)
        return rule, plans

    def _take(
        self,
        rule: Rule,
        inputs: Sequence[int],
        outputs: Sequence[int],
        plans: tuple[AxisPlan, ...],
    ) -> None:
        parts = [
            value
            for value, component in zip(inputs, rule.inputs, strict=True)
            if isinstance(component, PartialSum)
            and isinstance(self.versions[value][0], PartialSum)
        ]
        for value, component in zip(inputs, rule.inputs, strict=True):
            self._convert(value, component)
        for value, component in zip(outputs, rule.outputs, strict=True):
            self._produce(value, component)
            if isinstance(component, PartialSum):
                if parts and not plans:
                    self.sums.add_edges(parts, value)
                else:
                    self.sums.add_source(value)

    def _produce(self, value: int, component: Component) -> None:
        self.produced[value] = component
        self.versions[value] = [component]
        if isinstance(component, PartialSum):
            self.sums.costs[value] = self._transition(value, component, broadcast)
            if value in self.early:
                self._convert(value, self.early[value])

    def _convert(self, value: int, target: Component) -> None:
        versions = self.versions[value]
        if target in versions or isinstance(target, PartialSum):
            return  # making a partial sum is free, and nothing to keep
        paid = self._cost_to(value, target)
        self.cost += paid
        if isinstance(versions[0], PartialSum):
            self.sums.add_sink(value, target, paid)
            self.versions[value] = [target]
        else:
            versions.append(target)

    def _give(self, value: int, wanted: Component | AddUp | None) -> Component:
        """Returns the component of a result, after converting it if asked to."""
        given = self.versions[value][0]
        if wanted is None or (wanted is ADD_UP and not isinstance(given, PartialSum)):
            return given
        target = broadcast if isinstance(wanted, AddUp) else wanted
        self._convert(value, target)
        return target

    def _cheapest(self, index: int, given: tuple[Component, ...]) -> Rule:
        rule_set = self.rule_sets[index]
        operation = self.local.region.operations[index]
        best, best_key = rule_set.rules[-1], None
        for rule in rule_set.rules:
            paid = self._cost_of(rule, operation.inputs, given)
            if paid is None:
                continue
            matches = sum(map(_equal, rule.inputs, given))
            paid += self._combine_cost(rule, operation.outputs)
            paid += self._debt(rule, operation.outputs)
            key = (paid, -matches)
            if best_key is None or key < best_key:
                best, best_key = rule, key
        return best

    def _cost_of(
        self, rule: Rule, inputs: Sequence[int], given: tuple[Component, ...]
    ) -> int | None:
        """Returns the cost of the conversions a rule needs, None if not allowed."""
        is_split = any(isinstance(c, Split) for c in given)
        total = 0
        for value, need, have in zip(inputs, rule.inputs, given, strict=True):
            if need in self.versions[value]:
                continue
            if isinstance(need, Split) and not is_split:
                return None
            if isinstance(need, PartialSum) and not _may_sum(rule, given, have):
                return None
            total += self._cost_to(value, need)
        return total

    def _debt(self, rule: Rule, outputs: Sequence[int]) -> int:
        """Returns what a partial result will still cost: at least a reduce-scatter."""
        if not rule.makes_partial or self.num_shards == 1:
            return 0
        sizes = [self.local.values[v].num_bytes for v in outputs]
        return sum(1 + cost.reduce_scatter_bytes(s, self.num_shards) for s in sizes)

    def _combine_cost(self, rule: Rule, outputs: Sequence[int]) -> int:
        if not rule.combine or self.num_shards == 1:
            return 0
        sizes = [self.local.values[v].num_bytes for v in outputs]
        return sum(1 + cost.all_reduce_bytes(s, self.num_shards) for s in sizes)

    def _cost_to(self, value: int, target: Component) -> int:
        return min(self._transition(value, c, target) for c in self.versions[value])

    def _transition(self, value: int, source: Component, target: Component) -> int:
        num_bytes = self.local.values[value].num_bytes
        return transition_cost(source, target, num_bytes, self.num_shards)


def _pinned(operation: Operation, name: str) -> Component:
    """The component on an axis that a sharding constraint asks for."""
    for dim, entry in enumerate(operation.params["sharding"].spec):
        if entry == name or (isinstance(entry, tuple) and name in entry):
            return Split(dim)
    return broadcast


def _may_sum(rule: Rule, given: Sequence[Component], have: Component) -> bool:
    """Whether an operand may become a partial sum for a rule.

    A broadcast one may where another operand is in parts already; a split one only
    to be selected from.
    """
    if isinstance(have, Split):
        return rule.is_selection
    return isinstance(have, Broadcast) and any(
        need == own and not isinstance(own, Broadcast)
        for need, own in zip(rule.inputs, given, strict=True)
    )


def _equal(left: Component, right: Component) -> bool:
    return left is right or left == right


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
