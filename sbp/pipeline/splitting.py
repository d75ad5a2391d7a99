"""Cuts a backward pass in two: input gradients first, products with weights later.

Of the two halves of a backward pass nobody waits for the gradients of weights. A
function is traced, its calls are inlined, and its equations are dealt out:

* what the first results need, is computed first;
* matrix products that only the other results need, and whatever uses them, are computed
  later: they are nearly all of that work;
* the small rest, such as sums for biases and norms, is computed first too, since its
  results are smaller than its operands.

Put aside in between are the operands of those products, before they were transposed,
reshaped, broadcast or widened. Nothing is computed twice but these.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from sbp._compat import run_equation
from sbp.deduction.region import CALLS

Tree = Any

# Free enough to be done again, from an operand that is no larger.
CHEAP = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "pvary",
    "reshape",
    "squeeze",
    "transpose",
)
PRODUCTS = ("conv_general_dilated", "dot_general", "ragged_dot_general")


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A function in two parts.

    Attributes:
        function: ``function(given, passing) -> (first, later)``, four trees. Both parts
            are given the same ``given``; ``passing`` exists in the first part alone.
    """

    function: Callable[[Tree, Tree], tuple[Tree, Tree]]

    def first(self, given: Tree, passing: Tree) -> tuple[Tree, list[jax.Array]]:
        """Returns the first results, and what has to be put aside for the others."""
        program = _trace(self.function, given, passing)
        values = program.start(given, passing)
        program.run(values, later=False)
        results = [program.read(values, name) for name in program.first]
        return (
            jax.tree.unflatten(program.first_structure, results),
            [values[name] for name in program.aside],
        )

    def later(self, given: Tree, passing: Tree, aside: list[jax.Array]) -> Tree:
        """Returns the other results.

        Args:
            given: As in the first part.
            passing: Anything of the types that the first part had; not looked at.
            aside: From the first part.
        """
        program = _trace(self.function, given, passing)
        values = program.start(given, ())
        values.update(zip(program.aside, aside, strict=True))
        program.run(values, later=True)
        results = [program.read(values, name) for name in program.last]
        return jax.tree.unflatten(program.last_structure, results)


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """An equation; operands are names, or literals."""

    eqn: core.JaxprEqn
    operands: tuple[Any, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A traced function with its calls inlined, and the deal.

    Attributes:
        steps: All equations.
        is_first: For each whether it is computed in the first part.
        is_later: For each whether it is computed in the second part, or again there.
        consts: Values that the function closes over. Names are numbers, and those of
            the arguments come first.
        first: Names of the first results.
        last: Names of the others.
        aside: Names of the values put aside.
        first_structure: Of the first results.
        last_structure: Of the others.
    """

    steps: Sequence[_Step]
    is_first: Sequence[bool]
    is_later: Sequence[bool]
    consts: Mapping[int, Any]
    first: Sequence[Any]
    last: Sequence[Any]
    aside: Sequence[int]
    first_structure: Any
    last_structure: Any

    def start(self, given: Tree, passing: Tree) -> dict[int, Any]:
        leaves = jax.tree.leaves((given, passing))
        return dict(enumerate(leaves)) | dict(self.consts)

    def run(self, values: dict[int, Any], *, later: bool) -> None:
        """Adds to ``values`` what the steps of one part compute."""
        wanted = self.is_later if later else self.is_first
        for step in itertools.compress(self.steps, wanted):
            operands = [self.read(values, operand) for operand in step.operands]
            found = run_equation(step.eqn, operands)
            values.update(zip(step.results, found, strict=True))

    @staticmethod
    def read(values: Mapping[int, Any], operand: Any) -> Any:
        return operand.val if isinstance(operand, core.Literal) else values[operand]


def _trace(function: Callable, given: Tree, passing: Tree) -> _Program:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(given, passing)
    num_given = len(jax.tree.leaves(given))
    first_leaves, first_structure = jax.tree.flatten(shapes[0])
    flat = _Flat(len(closed.jaxpr.invars))
    results = flat.inline(closed.jaxpr, closed.consts, range(flat.num_inputs))
    first, last = results[: len(first_leaves)], results[len(first_leaves) :]
    at_hand = set(range(num_given)) | flat.consts.keys()
    is_first, is_later, aside = _deal(flat.steps, first, last, at_hand)
    return _Program(
        steps=flat.steps,
        is_first=is_first,
        is_later=is_later,
        consts=flat.consts,
        first=first,
        last=last,
        aside=aside,
        first_structure=first_structure,
        last_structure=jax.tree.structure(shapes[1]),
    )


class _Flat:
    """Collects equations while calls are inlined; values are named by numbers."""

    def __init__(self, num_inputs: int):
        self.num_inputs = num_inputs
        self.names = itertools.count(num_inputs)
        self.steps: list[_Step] = []
        self.consts: dict[int, Any] = {}

    def inline(
        self, jaxpr: core.Jaxpr, consts: Sequence[Any], operands: Sequence[Any]
    ) -> list[Any]:
        """Appends the equations; returns the names of the results, or literals."""
        names = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            names[var] = next(self.names)
            self.consts[names[var]] = value

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else names[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            callee = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
            if callee is None:
                results = [next(self.names) for _ in eqn.outvars]
                self.steps.append(_Step(eqn, tuple(operands), tuple(results)))
            elif isinstance(callee, core.ClosedJaxpr):
                results = self.inline(callee.jaxpr, callee.consts, operands)
            else:
                results = self.inline(callee, (), operands)
            names.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def _deal(
    steps: Sequence[_Step], first: Sequence, last: Sequence, at_hand: set[int]
) -> tuple[list[bool], list[bool], list[int]]:
    """Returns which steps are first, which later, and what is put aside."""
    needed_first = _needed(steps, first)
    needed_last = _needed(steps, last)
    is_later = [False] * len(steps)
    late: set[int] = set()
    for number, step in enumerate(steps):
        if needed_last[number] and not needed_first[number]:
            uses_late = any(name in late for name in _variables(step.operands))
            is_later[number] = uses_late or _has_product(step.eqn)
            late.update(step.results if is_later[number] else ())
    maker = {name: i for i, step in enumerate(steps) for name in step.results}
    # Dicts rather than sets: the order must be the same each time.
    crossing = dict.fromkeys(
        name
        for names in (*(s.operands for s in itertools.compress(steps, is_later)), last)
        for name in _variables(names)
        if name not in late
    )
    aside: dict[int, None] = {}
    again = list(is_later)
    for name in crossing:
        while name not in at_hand and (source := _source(steps, maker, name)):
            number, name = source
            again[number] = True
        if name not in at_hand:
            aside[name] = None
    is_first = _needed(steps, [*first, *aside])
    return is_first, again, list(aside)


def _needed(steps: Sequence[_Step], results: Sequence) -> list[bool]:
    """Returns which steps are needed for some results."""
    wanted = set(_variables(results))
    needed = [False] * len(steps)
    for number in reversed(range(len(steps))):
        if not wanted.isdisjoint(steps[number].results):
            needed[number] = True
            wanted.update(_variables(steps[number].operands))
    return needed


def _source(
    steps: Sequence[_Step], maker: Mapping[int, int], name: int
) -> tuple[int, int] | None:
    """Returns the step that makes a value from one no larger at no cost, and that."""
    if name not in maker:
        return None
    step = steps[maker[name]]
    operands = list(_variables(step.operands))
    if step.eqn.primitive.name not in CHEAP or len(operands) != 1:
        return None
    before, after = step.eqn.invars[0].aval, step.eqn.outvars[0].aval
    return (maker[name], operands[0]) if _size(before) <= _size(after) else None


def _has_product(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is a matrix product, or has one inside."""
    if eqn.primitive.name in PRODUCTS:
        return True
    return any(map(_has_product, _inner_equations(eqn)))


def _inner_equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
        if isinstance(value, core.ClosedJaxpr):
            yield from value.jaxpr.eqns
        elif isinstance(value, core.Jaxpr):
            yield from value.eqns


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


def _variables(names: Sequence) -> Iterator[int]:
    return (name for name in names if not isinstance(name, core.Literal))


def _size(aval: Any) -> int:
    itemsize = aval.dtype.itemsize if isinstance(aval.dtype, np.dtype) else 8
    return math.prod(aval.shape) * itemsize
