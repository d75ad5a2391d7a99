"""Rules of loops and branches: their bodies are deduced until carries agree."""

import math
from collections.abc import Callable, Sequence

from sbp.deduction.local import AxisPlan, LocalRegion, Wanted
from sbp.deduction.region import Operation
from sbp.rules.form import Rule, Shape
from sbp.signature import Component, PartialSum, Split, broadcast, partial_sum

Components = tuple[Component, ...]
# Plans a body, given the components of its arguments and those wanted of its results.
PlanBody = Callable[[LocalRegion, Components, tuple], AxisPlan]
Decision = tuple[Rule, tuple[AxisPlan, ...], int]

# A carry that has not settled after so many rounds is broadcast.
MAX_ROUNDS = 4


def decide(
    operation: Operation,
    bodies: Sequence[LocalRegion],
    shapes: Sequence[Shape],
    given: Components,
    num_shards: int,
    run: PlanBody,
) -> Decision:
    """Returns the rule of a loop or condition, the plans of its bodies, their cost.

    Args:
        operation: The loop or condition.
        bodies: Its bodies or branches.
        shapes: Shapes of the operands, cut by the axes decided before.
        given: Component of each operand.
        num_shards: Devices along the axis.
        run: Plans a body, given the components of its arguments and those wanted.
    """
    match operation.name:
        case "scan":
            scanned = tuple(map(_scanned, given, shapes, [num_shards] * len(given)))
            return _decide_scan(operation, bodies[0], given, scanned, run)
        case "while":
            return _decide_while(operation, bodies, given, run)
        case "cond":
            return _decide_cond(bodies, given, run)
    raise AssertionError(f"{operation.name} has bodies, but no rule")


def _decide_scan(
    operation: Operation,
    body: LocalRegion,
    given: Components,
    scanned: Components,
    run: PlanBody,
) -> Decision:
    num_consts, num_carry = (
        operation.params["num_consts"],
        operation.params["num_carry"],
    )
    consts = tuple(map(_invariant, given[:num_consts]))
    carry = given[num_consts : num_consts + num_carry]
    xs = scanned[num_consts + num_carry :]
    inner = tuple(_shifted(component, -1) for component in xs)
    num_ys = len(body.region.outputs) - num_carry

    def step(carry: Components, wanted: Wanted) -> AxisPlan:
        return run(body, (*consts, *carry, *inner), (*wanted, *[None] * num_ys))

    carry, plan = _settle(step, carry)
    ys = tuple(_shifted(component, 1) for component in plan.outputs[num_carry:])
    rule = Rule((*consts, *carry, *xs), (*carry, *ys))
    return rule, (plan,), plan.cost * operation.params["length"]


def _decide_while(
    operation: Operation,
    bodies: Sequence[LocalRegion],
    given: Components,
    run: PlanBody,
) -> Decision:
    condition, body = bodies
    num_cond, num_body = (operation.params[f"{k}_nconsts"] for k in ("cond", "body"))
    consts = tuple(map(_invariant, given[: num_cond + num_body]))
    of_cond, of_body = consts[:num_cond], consts[num_cond:]
    carry, plan = _settle(
        lambda carry, wanted: run(body, (*of_body, *carry), tuple(wanted)),
        given[num_cond + num_body :],
    )
    test = run(condition, (*of_cond, *carry), (broadcast,))
    # How often it turns is not known: once stands for any number.
    return Rule((*consts, *carry), carry), (test, plan), test.cost + plan.cost


def _decide_cond(
    bodies: Sequence[LocalRegion], given: Components, run: PlanBody
) -> Decision:
    operands = given[1:]
    free = (None,) * len(bodies[0].region.outputs)
    results = [run(body, operands, free).outputs for body in bodies]
    agreed = tuple(_agree(components) for components in zip(*results, strict=True))
    plans = tuple(run(body, operands, agreed) for body in bodies)
    cost = max(plan.cost for plan in plans)
    return Rule((broadcast, *operands), agreed), plans, cost


def _settle(
    step: Callable[[Components, Wanted], AxisPlan], carry: Components
) -> tuple[Components, AxisPlan]:
    """Returns components of the carry that one turn of the loop keeps.

    The components that come out are tried as those that go in. A sum that grows in
    the loop is carried in parts if that saves bytes in each turn.
    """
    wanted: Wanted = [None] * len(carry)
    for _ in range(MAX_ROUNDS):
        plan = step(carry, wanted)
        result = plan.outputs[: len(carry)]
        if result == carry:
            return carry, plan
        grown = [
            isinstance(b, PartialSum) and not isinstance(a, PartialSum)
            for a, b in zip(carry, result, strict=True)
        ]
        if not any(grown):
            carry = result
            continue
        in_parts = _where(grown, [partial_sum] * len(carry), carry)
        pinned = [c if g else w for g, c, w in zip(grown, carry, wanted, strict=True)]
        if step(in_parts, wanted).cost < step(carry, pinned).cost:
            carry = in_parts
        else:
            wanted = pinned
    carry = tuple(
        a if a == b else broadcast for a, b in zip(carry, result, strict=True)
    )
    return carry, step(carry, carry)


def _where(
    choose: Sequence[bool], yes: Sequence[Component], no: Sequence[Component]
) -> Components:
    return tuple(y if c else n for c, y, n in zip(choose, yes, no, strict=True))


def _agree(components: Components) -> Component:
    """The component of a result that branches return with these components."""
    different = set(components)
    if len(different) == 1:
        return components[0]
    different.discard(broadcast)
    # Making a broadcast value split or partial is free; all else is not.
    return different.pop() if len(different) == 1 else broadcast


def _invariant(component: Component) -> Component:
    """A partial sum read in a loop is added up once, before it."""
    return broadcast if isinstance(component, PartialSum) else component


def _scanned(component: Component, shape: Shape, num_shards: int) -> Component:
    """The scanned dim is walked through by all devices together: it stays whole."""
    if component != Split(0):
        return component
    fitting = [d for d, size in enumerate(shape) if d > 0 and size % num_shards == 0]
    is_empty = math.prod(shape) == 0
    return Split(fitting[0]) if fitting and not is_empty else broadcast


def _shifted(component: Component, by: int) -> Component:
    return Split(component.dim + by) if isinstance(component, Split) else component
