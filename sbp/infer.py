"""``sbp.jit``: runs a function of plain arrays on global tensors.

The function is written for one device. Its jaxpr is walked operation by operation,
the signature of every intermediate is deduced from those of the arguments, and
conversions are inserted where an operand does not fit. The result is one compiled
program whose communication is exactly what ``sbp.explain`` lists.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from sbp._compat import no_mesh_set
from sbp.assemble import fit
from sbp.deduction.arguments import Arguments, TensorType, is_on_mesh, read
from sbp.deduction.compiling import (
    Backward,
    Call,
    Compiled,
    Forward,
    Wants,
    compile_program,
    dual,
)
from sbp.deduction.local import ADD_UP, Wanted
from sbp.deduction.program import Instruction, Program
from sbp.reshard import dual_spec
from sbp.rules.form import is_inexact
from sbp.signature import Component
from sbp.tiling import Axes

PartialOutputs = Literal["add_up", "keep"]


class FallbackWarning(UserWarning):
    """An operation that has no rules gathers its operands on every device."""


class Jitted:
    """A function on global tensors, made by `jit`.

    Attributes:
        function: The function of plain arrays.
        out_sbp: Signatures asked of its results.
        partial_outputs: What becomes of results that are partial sums.
        static_argnames: Keyword arguments that are not arrays.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        out_sbp: Any = None,
        partial_outputs: PartialOutputs = "add_up",
        static_argnames: Sequence[str] = (),
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.out_sbp = out_sbp
        self.partial_outputs = partial_outputs
        self.static_argnames = frozenset(static_argnames)
        self._cache: dict[Hashable, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on global tensors."""
        call, leaves = self._flatten(args, kwargs)
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if is_traced and not any(map(is_on_mesh, leaves)):
            # Inside another sbp.jit, which deduces for all of it.
            return self.function(*args, **kwargs)
        arguments = read(leaves, self._name)
        if not is_traced:
            return self._run(call, arguments, self._wants)
        key = ("differentiable", call, arguments.types)
        if key not in self._cache:
            self._cache[key] = self._differentiable(call, arguments.types)
        return self._cache[key](*leaves)

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Returns what a call with such arguments runs, without running it.

        Args:
            *args: Global tensors, or ``jax.ShapeDtypeStruct`` with a sharding.
            **kwargs: Likewise.
        """
        call, leaves = self._flatten(args, kwargs)
        return self._compiled(call, read(leaves, self._name), self._wants)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Returns the lowered program, as ``jax.jit(f).lower(...)`` does."""
        call, leaves = self._flatten(args, kwargs)
        arguments = read(leaves, self._name)
        compiled = self._compiled(call, arguments, self._wants)
        return compiled.run.lower(*arguments.on_mesh())

    @property
    def _name(self) -> str:
        return f"sbp.jit({getattr(self.function, '__name__', self.function)})"

    def _flatten(self, args: tuple, kwargs: dict) -> tuple[Call, list[Any]]:
        static = {k: v for k, v in kwargs.items() if k in self.static_argnames}
        dynamic = {k: v for k, v in kwargs.items() if k not in static}
        leaves, tree = jax.tree.flatten((args, dynamic))
        return Call(self.function, tree, tuple(sorted(static.items()))), leaves

    def _wants(self, shapes: Any, axes: Axes) -> Sequence[Wanted]:
        """Returns what each result must be, for each axis."""
        default = ADD_UP if self.partial_outputs == "add_up" else None
        names = tuple(name for name, _ in axes)
        asked = _fill_prefix(self.out_sbp, shapes, self._name)
        by_value: list[Wanted] = [
            [default] * len(axes) if sbp is None else fit(sbp, names, dict(axes), shape)
            for sbp, shape in zip(asked, jax.tree.leaves(shapes), strict=True)
        ]
        return _by_axis(by_value, axes)

    def _wants_forward(self, shapes: Any, axes: Axes) -> Sequence[Wanted]:
        results, derivative = shapes
        residuals = [None] * len(jax.tree.leaves(derivative))
        return [[*wanted, *residuals] for wanted in self._wants(results, axes)]

    def _run(
        self,
        call: Callable,
        arguments: Arguments,
        wants: Wants,
        out_specs: Sequence[P] | None = None,
    ) -> Any:
        compiled = self._compiled(call, arguments, wants, out_specs)
        with contextlib.nullcontext() if arguments.is_traced else no_mesh_set():
            results = compiled.run(*arguments.on_mesh())
        return jax.tree.unflatten(compiled.out_tree, results)

    def _compiled(
        self,
        call: Callable,
        arguments: Arguments,
        wants: Wants,
        out_specs: Sequence[P] | None = None,
    ) -> Compiled:
        mesh = arguments.mesh
        mesh = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        key = (call, arguments.types, mesh)
        if key not in self._cache:
            self._cache[key] = compile_program(
                call, arguments.types, mesh, wants, out_specs
            )
            _warn_of_fallbacks(self._cache[key].program, self._name)
        return self._cache[key]

    def _differentiable(
        self, call: Call, types: tuple[TensorType, ...]
    ) -> Callable[..., Any]:
        """Returns the function with a backward pass that is deduced like itself."""
        numbers = [t for t in types if is_inexact(t.dtype)]
        duals = [dual(t.signature) for t in numbers]
        specs = [P() if t.spec is None else dual_spec(t.spec) for t in numbers]

        def wants_backward(_: Any, axes: Axes) -> Sequence[Wanted]:
            return _by_axis(duals, axes)

        def run(*leaves: Any) -> Any:
            return self._run(call, read(leaves, self._name), self._wants)

        def forward(*leaves: Any) -> tuple[Any, Any]:
            arguments = read(leaves, self._name)
            return self._run(Forward(call), arguments, self._wants_forward)

        def backward(derivative: Any, cotangents: Any) -> tuple:
            leaves = jax.tree.leaves(cotangents)
            given = [c for c in leaves if c.dtype != jax.dtypes.float0]
            leaves, tree = jax.tree.flatten((derivative, given))
            arguments = read(leaves, self._name)
            call = Backward(tree)
            grads = iter(self._run(call, arguments, wants_backward, specs))
            return tuple(next(grads) if is_inexact(t.dtype) else None for t in types)

        differentiable = jax.custom_vjp(run)
        differentiable.defvjp(forward, backward)
        return differentiable


def jit(
    function: Callable[..., Any],
    *,
    out_sbp: Any = None,
    partial_outputs: PartialOutputs = "add_up",
    static_argnames: Sequence[str] = (),
) -> Jitted:
    """Returns ``function`` for global tensors, compiled as one program.

    ``function`` is written as if for one device. Calling the result deduces the
    signature of every intermediate from those of the arguments, see
    `sbp.deduction.axis` for how, and inserts conversions where they are needed. Its
    values and gradients equal those of ``function``; `sbp.explain` lists what is
    communicated.

    Arguments that are not global tensors, such as scalars, NumPy arrays and random
    keys, are the same on every device. Inside another `jit` the function is part of
    the outer one. Reverse-mode derivatives of any order work inside
    (``sbp.jit(jax.grad(f))``) and through the result (``jax.grad(sbp.jit(f))``, within
    ``jax.jit`` or under ``jax.set_mesh(placement.mesh)``: JAX asks for that).

    Args:
        function: Takes and returns pytrees of arrays.
        out_sbp: Signatures of the results: a pytree like the results, or a prefix of
            it, of what ``sbp=`` takes elsewhere. None means as deduced.
        partial_outputs: What becomes of results deduced to be partial sums, where
            ``out_sbp`` asks for nothing: ``"add_up"`` makes them broadcast, so that
            they can be printed, ``"keep"`` leaves them in parts.
        static_argnames: Keyword arguments that are not arrays.

    Raises:
        ValueError: When called, if no argument is a global tensor or they are on
            several placements, or if ``out_sbp`` does not fit a result.

    Communication: what `sbp.explain` says.

    Example:
        >>> import jax.numpy as jnp, sbp
        >>> p = sbp.placement("cpu", [0, 1], ("tensor",))
        >>> x = sbp.to_global(jnp.ones((4, 8)), p, sbp.broadcast)
        >>> w = sbp.to_global(jnp.ones((8, 6)), p, sbp.split(1))
        >>> y = sbp.jit(lambda x, w: jnp.tanh(x @ w))(x, w)
        >>> print(jax.typeof(y))
        float32[4,6@tensor]
    """
    return Jitted(
        function,
        out_sbp=out_sbp,
        partial_outputs=partial_outputs,
        static_argnames=static_argnames,
    )


def _by_axis(by_value: Sequence[Sequence], axes: Axes) -> list[Wanted]:
    return [[wanted[i] for wanted in by_value] for i in range(len(axes))]


def _fill_prefix(out_sbp: Any, shapes: Any, what: str) -> list[Any]:
    """Returns one signature, or None, for each result."""
    if out_sbp is None:
        return [None] * len(jax.tree.leaves(shapes))
    try:
        full = jax.tree.broadcast(out_sbp, shapes, is_leaf=_is_signature)
    except ValueError as error:
        raise ValueError(
            f"{what}: out_sbp={out_sbp!r} is no prefix of the results, which are "
            f"{jax.tree.structure(shapes)}. Give one signature for all results, or a "
            "tree like them with a signature or None at each leaf."
        ) from error
    return jax.tree.leaves(full, is_leaf=_is_signature)


def _is_signature(node: object) -> bool:
    if node is None or isinstance(node, Component):
        return True
    parts = tuple(node.values()) if isinstance(node, Mapping) else node
    if not isinstance(parts, (tuple, list)) or not parts:
        return False
    return all(isinstance(part, Component) for part in parts)


def _warn_of_fallbacks(program: Program, what: str) -> None:
    names = {
        instruction.operation.name
        for instruction in _instructions(program)
        if instruction.is_fallback and _gathers(instruction)
    }
    if names:
        warnings.warn(
            f"{what} computes {', '.join(sorted(names))} on every device: there is no "
            "rule that splits it, so its operands are gathered. sbp.explain shows "
            "where, and what it costs.",
            FallbackWarning,
            stacklevel=5,  # the call of what sbp.jit returned
        )


def _gathers(instruction: Instruction) -> bool:
    return any(not step.is_free for c in instruction.conversions for step in c.steps)


def _instructions(program: Program) -> Iterator[Instruction]:
    for instruction in program.instructions:
        yield instruction
        for body in instruction.bodies:
            yield from _instructions(body)
