"""Which rule each operation takes on one mesh axis.

Axes are decided one after another, from the first; the next sees the shapes that the
previous ones left. On one axis, operations are decided in the order of execution:

1. If operands have exactly the components of a rule, that rule is taken.
2. Otherwise the rule that moves the fewest bytes: those of converting the operands,
   and, if a result is a partial sum, a *debt*: what adding it up will cost.
   Slicing a broadcast operand is free, so ``S(0) + B`` stays ``S(0)``.
3. At equal cost the rule that more operands match, then the order of the table.

Two conversions are never made unasked: to a split where no operand is split, and to a
partial sum unless another operand already is in parts. A partial sum is therefore
added up to broadcast where an operation needs its value, and to a split where another
operand is split. *Where* on the way from its origin it is added up is chosen
afterwards, by a minimum cut (`sbp.deduction.cut`).

Such choices see no further than one operation. `deduce` therefore plans the whole
region several times, with debts from small to prohibitive, and takes the plan that
moves the fewest bytes in all.
"""

from collections.abc import Hashable, Mapping, Sequence

from sbp import cost
from sbp.deduction import cut
from sbp.deduction.local import AddUp, AxisPlan, LocalRegion, MeshAxis, Wanted
from sbp.deduction.walk import Debt, Walk
from sbp.rules import admissible_rules
from sbp.signature import Component, PartialSum


def _prohibitive(num_bytes: int, num_shards: int) -> int:
    return 1 << 60


# A partial sum may end as a split, or whole at twice the cost; or all that it meets
# may need it whole anyway.
DEBTS: tuple[Debt, ...] = (
    cost.reduce_scatter_bytes,
    cost.all_reduce_bytes,
    _prohibitive,
)


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
    plans = []
    for debt in DEBTS:
        planner = Planner(axis, debt)
        plans.append(planner.plan(local, tuple(inputs), tuple(wanted)))
        if not planner.has_weighed_debt:
            break  # no choice depends on it
    return min(plans, key=lambda plan: _cost_in_all(local, plan, axis))


def _cost_in_all(local: LocalRegion, plan: AxisPlan, axis: MeshAxis) -> int:
    """Returns the cost of a plan, with the least that its partial results will cost."""
    results = zip(local.region.outputs, plan.outputs, strict=True)
    left = [v for v, c in results if isinstance(c, PartialSum)]
    sizes = [local.values[v].num_bytes for v in left]
    return plan.cost + sum(cost.reduce_scatter_bytes(s, axis.size) for s in sizes)


class Planner:
    """Plans regions on one axis.

    Attributes:
        axis: The axis.
        debt: Bytes that a partial sum will cost, of its size and that of the axis.
        has_weighed_debt: Whether the debt has played a part in a choice.
    """

    def __init__(self, axis: MeshAxis, debt: Debt) -> None:
        self.axis = axis
        self.debt = debt
        self.has_weighed_debt = False
        self._plans: dict[Hashable, AxisPlan] = {}

    def plan(
        self,
        local: LocalRegion,
        inputs: tuple[Component, ...],
        wanted: tuple[Component | AddUp | None, ...],
    ) -> AxisPlan:
        """Returns the plan of a region, see `deduce`."""
        key = local, inputs, wanted
        if key not in self._plans:
            self._plans[key] = self._plan(local, inputs, wanted)
        return self._plans[key]

    def _plan(
        self, local: LocalRegion, inputs: Sequence[Component], wanted: Wanted
    ) -> AxisPlan:
        rule_sets = [admissible_rules(use, self.axis.size) for use in local.uses]

        def walk(early: Mapping[int, Component]) -> Walk:
            return Walk(
                local,
                self.axis,
                rule_sets,
                debt=self._weigh_debt,
                plan_body=self.plan,
                early=early,
            )

        late = walk({})
        plan = late.run(inputs, wanted)
        early = cut.places_to_add_up(late.sums)
        if not early:
            return plan
        return min(plan, walk(early).run(inputs, wanted), key=lambda p: p.cost)

    def _weigh_debt(self, num_bytes: int, num_shards: int) -> int:
        self.has_weighed_debt = True
        return self.debt(num_bytes, num_shards)
