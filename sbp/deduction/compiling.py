"""From a function of leaves to a compiled program, and to its derivative."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from sbp.deduction import execute
from sbp.deduction.arguments import TensorType
from sbp.deduction.local import Wanted
from sbp.deduction.program import Program, deduce_program
from sbp.deduction.region import trace
from sbp.rules.form import is_inexact
from sbp.signature import PartialSum, Signature, broadcast
from sbp.spec import to_partition_spec
from sbp.tiling import Axes

# For the shapes of the results and the mesh axes: what each must be.
Wants = Callable[[Any, Axes], Sequence[Wanted]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A function, compiled for the types of its arguments.

    Attributes:
        program: What runs on the devices.
        run: The jitted function of the arguments' leaves; gives the results' leaves.
        out_tree: Structure of the results.
    """

    program: Program
    run: Any
    out_tree: Any


def compile_program(
    function: Callable[..., Any],
    types: Sequence[TensorType],
    mesh: AbstractMesh,
    wants: Wants,
    out_specs: Sequence[P] | None = None,
) -> Compiled:
    """Deduces a function of leaves and returns it as one jitted program.

    Args:
        function: Takes the leaves, returns a pytree.
        types: Their types.
        mesh: The mesh that they are on.
        wants: What the results must be.
        out_specs: Partition specs of the results, for what signatures do not tell.
    """
    names, axes = tuple(mesh.axis_names), tuple(mesh.shape.items())
    structs = [type_.to_struct() for type_ in types]
    region, shapes = trace(function, *structs, axes=axes)
    program = deduce_program(
        region,
        axes=axes,
        inputs=[type_.signature for type_ in types],
        wanted=wants(shapes, axes),
    )
    unplaced = to_partition_spec((broadcast,) * len(names), names)
    in_specs = tuple(unplaced if t.spec is None else t.spec for t in types)
    if out_specs is None:
        out_specs = [to_partition_spec(s, names) for s in program.outputs]

    def run_locally(*shards: jax.Array) -> list[jax.Array]:
        return execute.run(program, *shards)

    # Replication follows from the signatures; JAX's own check knows no partial sums.
    sharded = jax.shard_map(
        run_locally,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=list(out_specs),
        check_vma=False,
    )
    return Compiled(program, jax.jit(sharded), jax.tree.structure(shapes))


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A function of leaves, made from one of pytrees.

    Attributes:
        function: Takes pytrees.
        tree: Structure of its arguments, ``(args, kwargs)``.
        static: Keyword arguments that are not traced.
    """

    function: Callable[..., Any]
    tree: Any
    static: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *leaves: Any) -> Any:
        """Returns the function's results."""
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.function(*args, **kwargs, **dict(self.static))


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """A function of leaves that returns its results and their derivative.

    The derivative is taken of the plain function, before any deduction; it is a
    pytree, whose leaves are the residuals.
    """

    call: Callable[..., Any]

    def __call__(self, *leaves: Any) -> tuple[Any, Any]:
        """Returns the results, and the derivative as a pytree."""
        is_number = [is_inexact(leaf.dtype) for leaf in leaves]

        def of_numbers(*numbers: Any) -> tuple[list[Any], tuple[Any, Any]]:
            merged = _merge(is_number, numbers, leaves)
            results, tree = jax.tree.flatten(self.call(*merged))
            return [r for r in results if is_inexact(r.dtype)], (results, tree)

        numbers = [
            leaf for leaf, number in zip(leaves, is_number, strict=True) if number
        ]
        differentiable, derivative, (results, tree) = jax.vjp(
            of_numbers, *numbers, has_aux=True
        )
        chosen = [is_inexact(r.dtype) for r in results]
        return jax.tree.unflatten(
            tree, _merge(chosen, differentiable, results)
        ), derivative


@dataclasses.dataclass(frozen=True, slots=True)
class Backward:
    """A function of the leaves of a derivative and its cotangents.

    Attributes:
        tree: Structure of the two.
    """

    tree: Any

    def __call__(self, *leaves: Any) -> list[Any]:
        """Returns the gradients."""
        derivative, cotangents = jax.tree.unflatten(self.tree, leaves)
        return list(derivative(cotangents))


def dual(signature: Signature) -> Signature:
    """Returns the signature of a gradient: each addend of a sum gets all of it."""
    return tuple(broadcast if isinstance(c, PartialSum) else c for c in signature)


def _merge(
    choose: Sequence[bool], chosen: Sequence[Any], others: Sequence[Any]
) -> list[Any]:
    remaining = iter(chosen)
    return [next(remaining) if c else o for c, o in zip(choose, others, strict=True)]
