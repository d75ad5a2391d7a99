"""One pass over the operations of a region, on one mesh axis."""

import functools
from collections.abc import Callable, Mapping, Sequence

from sbp import cost
from sbp.deduction import control_flow
from sbp.deduction.cut import SumGraph
from sbp.deduction.local import ADD_UP, AddUp, AxisPlan, LocalRegion, MeshAxis, Wanted
from sbp.deduction.region import BARRIER, CONSTRAINT, Operation
from sbp.rules.form import Rule, RuleSet
from sbp.signature import Broadcast, Component, PartialSum, Split, broadcast

# Bytes that a partial sum will cost, of its size and the devices along the axis.
Debt = Callable[[int, int], int]


class Walk:
    """Decides operation after operation.

    ``versions[v]`` are the components in which value ``v`` is at hand, the one it was
    made in first. A partial sum that was added up is no longer at hand.
    """

    def __init__(
        self,
        local: LocalRegion,
        axis: MeshAxis,
        rule_sets: Sequence[RuleSet],
        *,
        debt: Debt,
        plan_body: control_flow.PlanBody,
        early: Mapping[int, Component],
    ) -> None:
        self.local = local
        self.axis = axis
        self.num_shards = axis.size
        self.debt = debt
        self.plan_body = plan_body
        self.rule_sets = rule_sets
        self.early = early
        self.versions: list[tuple[Component, ...]] = [()] * len(local.values)
        self.produced: list[Component] = [broadcast] * len(local.values)
        self.cost = 0
        self.sums = SumGraph()

    def run(self, inputs: Sequence[Component], wanted: Wanted) -> AxisPlan:
        """Returns the plan; see `sbp.deduction.axis.deduce` for the arguments."""
        region = self.local.region
        for value in region.constants:
            self.versions[value] = _only(broadcast)
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
                operation, bodies, shapes, given, self.num_shards, self.plan_body
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
        self.versions[value] = _only(component)
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
            self.versions[value] = _only(target)
        else:
            self.versions[value] = (*versions, target)

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
        """Returns what partial results will still cost."""
        if not rule.makes_partial or self.num_shards == 1:
            return 0
        sizes = [self.local.values[v].num_bytes for v in outputs]
        return sum(1 + self.debt(s, self.num_shards) for s in sizes)

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


@functools.lru_cache(maxsize=64)
def _only(component: Component) -> tuple[Component]:
    """One object per component: a new one for each value keeps the collector busy."""
    return (component,)


def _equal(left: Component, right: Component) -> bool:
    return left is right or left == right


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
