"""Which rules `sbp.jit` takes: OneFlow's choices, and where ours are better."""

import jax.numpy as jnp
import programs
import pytest
from jax import lax

import sbp
from sbp import partial_sum, split
from sbp.infer import Jitted
from sbp.signature import parse


@pytest.fixture(scope="module")
def line():
    """Two devices along one axis."""
    return sbp.placement("cpu", [0, 1], ("x",))


def deduced(function, placement, *operands):
    """Returns how the last operation takes its operands, and what it gives.

    Operands are pairs of a shape and a component.
    """
    structs = [
        programs.struct(shape, placement, (component,)) for shape, component in operands
    ]
    jitted = Jitted(function, partial_outputs="keep")
    last = jitted.compile(*structs).program.instructions[-1]
    return [str(s[0]) for s in last.inputs], str(last.outputs[0][0])


# Product (4, 6) @ (6, 8) on two devices: components of the operands as given, as
# converted, and of the result. These are also OneFlow's.
MATMUL = """
    S(0) S(0) : S(1) S(0) -> P      S(0) S(1) : B    S(1) -> S(1)
    S(0) B    : S(0) B    -> S(0)   S(0) P    : B    P    -> P
    S(1) S(0) : S(1) S(0) -> P      S(1) S(1) : B    S(1) -> S(1)
    S(1) B    : S(0) B    -> S(0)   S(1) P    : B    P    -> P
    B    S(0) : B    S(1) -> S(1)   B    S(1) : B    S(1) -> S(1)
    B    B    : B    B    -> B      B    P    : B    P    -> P
    P    S(0) : S(1) S(0) -> P      P    S(1) : B    S(1) -> S(1)
    P    B    : P    B    -> P      P    P    : B    P    -> P
"""


# (4, 4) with (4, 4), where OneFlow does the same.
ARITHMETIC = """
    add : S(0) S(1) : S(0) S(0) -> S(0)   add : S(0) P    : S(0) S(0) -> S(0)
    add : P    P    : P    P    -> P      mul : P    B    : P    B    -> P
    mul : P    S(0) : S(0) S(0) -> S(0)
    div : P    B    : P    B    -> P      div : B    P    : B    B    -> B
    div : P    P    : P    B    -> P
"""


# Where we do better. Slicing is free: OneFlow gathers the split operand, or adds up
# the partial one. Differences of partial sums are partial. Of two equal factors in
# parts either may be added up.
BETTER = """
    mul : P    P    : P    B    -> P
    add : S(0) B    : S(0) S(0) -> S(0)   add : B    P    : P    P    -> P
    sub : P    P    : P    P    -> P      sub : S(1) B    : S(1) S(1) -> S(1)
"""


def rows(text, num_fields):
    """Splits a table of several columns of rows into fields."""
    words = text.replace(":", " ").replace("->", " ").split()
    return [tuple(words[i : i + num_fields]) for i in range(0, len(words), num_fields)]


@pytest.mark.parametrize("row", rows(MATMUL, 5), ids=" ".join)
def test_matmul_converts_the_operand_that_is_cheapest_to_convert(row, line):
    a, b, *cast, result = row
    shapes = ((4, 6), parse(a)[0]), ((6, 8), parse(b)[0])
    assert deduced(jnp.matmul, line, *shapes) == (cast, result)


def test_matmul_weighs_sizes(line):
    def result(m):
        return deduced(jnp.matmul, line, ((m, 5 + 1), split(0)), ((6, 8), split(0)))

    assert result(100) == (["S(0)", "B"], "S(0)")
    assert result(4) == (["S(1)", "S(0)"], "P")


@pytest.mark.parametrize("row", rows(ARITHMETIC, 6) + rows(BETTER, 6), ids=" ".join)
def test_arithmetic_keeps_splits_and_partial_sums(row, line):
    name, a, b, *cast, result = row
    shapes = ((4, 4), parse(a)[0]), ((4, 4), parse(b)[0])
    assert deduced(getattr(lax, name), line, *shapes) == (cast, result)


@pytest.mark.parametrize(
    ("function", "component", "cast", "result"),
    [
        # OneFlow: S(0) on two devices. We do not split what nobody has split.
        (jnp.tanh, partial_sum, "B", "B"),
        (lambda x: jnp.sum(x, 0), split(0), "S(0)", "P"),
        (lambda x: jnp.sum(x, 0), split(1), "S(1)", "S(0)"),
        (lambda x: jnp.sum(x, 0), partial_sum, "P", "P"),
        (lambda x: jnp.sum(x, 1), split(0), "S(0)", "S(0)"),
        (lambda x: jnp.sum(x, 1), split(1), "S(1)", "P"),
        # OneFlow: an all-to-all or all-gather of all of x.
        (lambda x: jnp.max(x, 0), split(0), "S(0)", "B"),
        (jnp.max, split(0), "S(0)", "B"),
        (lambda x: lax.slice(x, (0, 0), (4, 2)), split(0), "S(0)", "S(0)"),
        (lambda x: lax.slice(x, (0, 0), (4, 2)), partial_sum, "P", "P"),
        (lambda x: lax.neg(x), partial_sum, "P", "P"),
        (lambda x: lax.expand_dims(x, (1,)), partial_sum, "P", "P"),
        # Sorted along the split dim: split another one instead of gathering.
        (lambda x: lax.sort(x, dimension=1), split(1), "S(0)", "S(0)"),
    ],
)
def test_one_operand(function, component, cast, result, line):
    assert deduced(function, line, ((4, 4), component)) == ([cast], result)


def test_one_row_of_a_split_table_is_read_as_a_partial_sum(line):
    def read(x):
        return lax.slice(x, (3, 0), (4, 8))

    assert deduced(read, line, ((64, 8), split(0))) == (["P"], "P")


def test_a_bias_is_gathered_before_it_is_spread(line):
    def add_bias(x, b):
        return x + b[None]

    assert deduced(add_bias, line, ((4, 8), split(0)), ((8,), split(0)))[1] == "S(0)"
    explained = sbp.explain(
        add_bias,
        programs.struct((4, 8), line, (split(0),)),
        programs.struct((8,), line, (split(0),)),
    )
    assert explained.collectives == {"all-gather": 1}
    assert explained.num_bytes == 8 * 4 // 2
