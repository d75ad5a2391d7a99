"""Regions: a jaxpr as a flat list of operations on numbered values.

Calls are inlined (`jit`, custom derivative rules, rematerialization), so that what is
left are primitives, and loops and branches whose bodies are regions of their own.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType

from sbp._compat import no_mesh_set
from sbp.rules.form import Shape, Use

# Name of a primitive -> the parameter that holds the jaxpr it calls.
CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
}
REMATS = ("checkpoint", "remat2")

# Loops and branches: the parameters that hold the jaxprs of their bodies, in order.
BODIES = {
    "cond": ("branches",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
}

BARRIER = "optimization_barrier"
CONSTRAINT = "sharding_constraint"

# Results are the operands themselves. A reshard here is JAX's own, between the types
# of a mesh whose axes are all left to the compiler.
ALIASES = ("device_put", "name", "reshard", "stop_gradient")

# What JAX says when a traced function meets an array that is on a mesh.
MIXED_MESHES = "should match the aval mesh"


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """Shape and dtype of a value that an operation makes or reads."""

    shape: Shape
    dtype: Any

    @property
    def itemsize(self) -> int:
        """Bytes of an element; those of a random key are counted as eight."""
        return self.dtype.itemsize if isinstance(self.dtype, np.dtype) else 8

    @property
    def num_bytes(self) -> int:
        """Bytes of the dense value."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One primitive applied to values of its region.

    Attributes:
        name: Name of the primitive.
        primitive: The primitive, or None for a barrier.
        params: Its parameters, as in the jaxpr.
        inputs: Numbers of the operands.
        outputs: Numbers of the results.
        regions: Bodies of a loop or branches of a condition.
        sources: Where it was traced, then where the calls around it were.
    """

    name: str
    primitive: core.Primitive | None
    params: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    regions: tuple["Region", ...]
    sources: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Straight-line code.

    Attributes:
        values: All values, by number.
        inputs: Numbers of the arguments.
        outputs: Numbers of the results.
        constants: Values that are known: literals and arrays closed over.
        operations: In the order of execution.
        uses: What the rules of each operation depend on, on a mesh of no axes.
    """

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: Mapping[int, Any]
    operations: tuple[Operation, ...]
    uses: tuple[Use, ...]


def to_region(closed: core.ClosedJaxpr) -> Region:
    """Returns the region of a jaxpr.

    Example:
        >>> x = jax.ShapeDtypeStruct((4,), np.dtype("float32"))
        >>> region = to_region(jax.make_jaxpr(jax.nn.relu)(x))
        >>> [operation.name for operation in region.operations]
        ['max']
    """
    builder = _Builder()
    inputs = [builder.add(var.aval) for var in closed.jaxpr.invars]
    outputs = builder.inline(closed.jaxpr, closed.consts, inputs)
    operations = tuple(builder.operations)
    return Region(
        values=tuple(builder.values),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        constants=builder.constants,
        operations=operations,
        uses=tuple(_to_use(operation, builder.values) for operation in operations),
    )


class _Builder:
    """Collects the values and operations of one region while calls are inlined."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.constants: dict[int, Any] = {}
        self.operations: list[Operation] = []

    def add(self, aval: Any) -> int:
        self.values.append(Value(tuple(aval.shape), aval.dtype))
        return len(self.values) - 1

    def add_constant(self, value: Any, aval: Any) -> int:
        number = self.add(aval)
        if isinstance(value, jax.Array) and isinstance(value.dtype, np.dtype):
            value = np.asarray(value)  # it may be on a mesh, and must not be
        self.constants[number] = value
        return number

    def inline(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        arguments: Sequence[int],
        callers: tuple[Any, ...] = (),
    ) -> list[int]:
        """Appends the operations of a jaxpr; returns the numbers of its results."""
        numbers = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            numbers[var] = self.add_constant(value, var.aval)

        def read(atom: Any) -> int:
            if isinstance(atom, core.Literal):
                return self.add_constant(atom.val, atom.aval)
            return numbers[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            results = self._append(eqn, operands, (eqn.source_info, *callers))
            numbers.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _append(
        self, eqn: core.JaxprEqn, operands: list[int], sources: tuple[Any, ...]
    ) -> Sequence[int]:
        name = eqn.primitive.name
        if name in ALIASES:
            return operands
        if name in CALLS and CALLS[name] in eqn.params:
            if name in REMATS and eqn.params["differentiated"]:
                operands = self._fence(operands, sources)
            callee = eqn.params[CALLS[name]]
            if isinstance(callee, core.ClosedJaxpr):
                return self.inline(callee.jaxpr, callee.consts, operands, sources)
            return self.inline(callee, (), operands, sources)
        if name == BARRIER:
            return self._fence(operands, sources)
        results = [self.add(var.aval) for var in eqn.outvars]
        primitive, params = eqn.primitive, eqn.params
        self._operation(name, primitive, params, operands, results, sources)
        return results

    def _fence(self, operands: Sequence[int], sources: tuple[Any, ...]) -> list[int]:
        """Keeps a recomputation from merging with the first computation.

        One barrier for all operands: the recomputation then waits for the last of
        them, the cotangents, instead of running early and holding memory.
        """
        results = [len(self.values) + i for i in range(len(operands))]
        self.values += [self.values[operand] for operand in operands]
        self._operation(BARRIER, None, {}, operands, results, sources)
        return results

    def _operation(
        self,
        name: str,
        primitive: core.Primitive | None,
        params: Mapping[str, Any],
        operands: Sequence[int],
        results: Sequence[int],
        sources: tuple[Any, ...],
    ) -> None:
        bodies = [params[key] for key in BODIES.get(name, ())]
        flat = [
            b for body in bodies for b in (body if type(body) is tuple else (body,))
        ]
        operation = Operation(
            name=name,
            primitive=primitive,
            params=params if name == CONSTRAINT else _without_shardings(params),
            inputs=tuple(operands),
            outputs=tuple(results),
            regions=tuple(to_region(body) for body in flat),
            sources=sources,
        )
        self.operations.append(operation)


def _without_shardings(params: Mapping[str, Any]) -> dict[str, Any]:
    """What a function of plain arrays says of shardings is about no mesh axis."""
    unset = dict.fromkeys(("sharding", "out_sharding") & params.keys())
    return {**params, **unset}


def _to_use(operation: Operation, values: Sequence[Value]) -> Use:
    return Use(
        name=operation.name,
        shapes=tuple(values[v].shape for v in operation.inputs),
        dtypes=tuple(values[v].dtype for v in operation.inputs),
        outputs=tuple(values[v].shape for v in operation.outputs),
        params=() if operation.regions else _hashable(operation.params),
    )


def _hashable(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The parameters that can be part of a key; rules read no others."""
    return tuple((k, v) for k, v in sorted(params.items()) if _is_hashable(v))


def _is_hashable(value: Any) -> bool:
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)) or callable(value):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def trace(
    function: Callable[..., Any],
    *arguments: Any,
    axes: Sequence[tuple[str, int]] = (),
) -> tuple[Region, Any]:
    """Returns the region of a function of plain arrays, and its results' shapes.

    Args:
        function: The function.
        *arguments: What it takes, or their shapes.
        axes: Names and sizes of the mesh axes that ``sbp.constrain`` may name.

    Raises:
        ValueError: If the function closes over a global tensor.
    """
    # A mesh that the caller has set is none of the plain function's business.
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    kinds = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(sizes, names, axis_types=kinds)
    with no_mesh_set(), jax.sharding.use_abstract_mesh(mesh):
        try:
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        except ValueError as error:
            if MIXED_MESHES not in str(error):
                raise
            raise ValueError(_CLOSED_OVER) from error
    for constant in closed.consts:
        if isinstance(constant, jax.Array) and not constant.is_fully_replicated:
            raise ValueError(_CLOSED_OVER)
    return to_region(closed), shapes


_CLOSED_OVER = (
    "The function closes over a global tensor, whose signature is then not seen. Pass "
    "the tensor as an argument."
)
