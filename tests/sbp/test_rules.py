"""Every rule of the table computes the right values, on one axis and on two."""

import itertools

import jax
import numpy as np
import pytest
import rule_cases
import sharded

import sbp
from sbp.deduction import execute
from sbp.deduction.local import AxisPlan, LocalRegion, apply_axis
from sbp.deduction.program import build_program
from sbp.deduction.region import trace
from sbp.rules import FORMS, admissible_rules
from sbp.rules.form import Use
from sbp.signature import parse
from sbp.spec import to_partition_spec

# Their operands are random keys; test_infer.py has them in whole programs.
OF_KEYS = {"random_bits", "random_fold_in", "random_unwrap", "random_wrap"}
# Two axes: so many pairs of rules are drawn for each case.
NUM_PAIRS = {"elementwise": 2, "special": 2}
GROUPS = [
    pytest.param(group, marks=[pytest.mark.slow] if group == "special" else [])
    for group in rule_cases.GROUPS
]


def plan_with(local, rule):
    """The plan that gives the last operation of a region this rule."""
    region, everywhere = local.region, sbp.broadcast
    last = region.operations[-1]
    produced = [everywhere] * len(region.values)
    pairs = zip(last.inputs + last.outputs, rule.inputs + rule.outputs, strict=True)
    for value, component in pairs:
        produced[value] = component
    rules = [admissible_rules(use, 2).rules[-1] for use in local.uses]
    rules[-1] = rule
    outputs = tuple(produced[v] for v in region.outputs)
    bodies = ((),) * len(rules)
    return AxisPlan(tuple(rules), bodies, tuple(produced), outputs, 0)


def programs_of(region, axes, num_pairs):
    """Yields a program for each rule, or for drawn pairs of rules on two axes."""
    whole = LocalRegion.whole(region)
    choices = [[]]
    for _ in axes:
        choices = [
            [*plans, plan_with(local, rule)]
            for plans in choices
            for local in [cut(whole, plans)]
            for rule in admissible_rules(local.uses[-1], 2).rules
        ]
    if len(axes) > 1:
        rng = np.random.default_rng(0)
        chosen = rng.permutation(len(choices))[:num_pairs]
        choices = [choices[i] for i in chosen]
    for plans in choices:
        inputs = tuple(
            tuple(plan.produced[value] for plan in plans) for value in region.inputs
        )
        yield build_program(region, axes, plans, inputs)


def cut(local, plans):
    for plan in plans:
        local = apply_axis(local, plan, 2)
    return local


def run_all(programs, arguments, placement):
    """Runs programs in one compiled program; gives the results of each."""

    def run_locally(shards):
        pairs = zip(programs, shards, strict=True)
        return [execute.run(program, *own) for program, own in pairs]

    def specs(signatures):
        return [to_partition_spec(s, placement.axis_names) for s in signatures]

    return jax.jit(
        jax.shard_map(
            run_locally,
            mesh=placement.mesh,
            in_specs=([specs(program.inputs) for program in programs],),
            out_specs=[specs(program.outputs) for program in programs],
            check_vma=False,
        )
    )(arguments)


@pytest.mark.parametrize("num_axes", [1, 2])
@pytest.mark.parametrize("group", GROUPS)
def test_every_rule_gives_the_dense_values(group, num_axes):
    placement = sbp.placement("cpu", np.arange(2**num_axes).reshape((2,) * num_axes))
    axes = tuple(placement.axis_sizes.items())
    names, programs, arguments, expected = [], [], [], []
    for name, function, values in rule_cases.GROUPS[group]:
        region, _ = trace(function, *values)
        dense = jax.tree.leaves(function(*values))
        num_pairs = NUM_PAIRS.get(group, 6)
        for seed, program in enumerate(programs_of(region, axes, num_pairs)):
            names.append(f"{name}: {program.inputs} -> {program.outputs}")
            programs.append(program)
            expected.append(dense)
            arguments.append(
                [
                    sharded.place(np.asarray(value), placement, signature, seed)
                    for value, signature in zip(values, program.inputs, strict=True)
                ]
            )

    results = run_all(programs, arguments, placement)

    for name, program, got, want in zip(
        names, programs, results, expected, strict=True
    ):
        for own, dense, signature in zip(got, want, program.outputs, strict=True):
            value = sharded.value_of(own, placement, signature)
            np.testing.assert_allclose(value, dense, rtol=1e-3, atol=2e-3, err_msg=name)


def test_every_row_of_the_table_has_a_case():
    cases = itertools.chain(*rule_cases.GROUPS.values())
    operations = {
        operation.name
        for _, function, values in cases
        for operation in trace(function, *values)[0].operations
    }
    assert set(FORMS) - operations == OF_KEYS


def rules_of(function, *values, num_shards=2):
    region, _ = trace(function, *values)
    return [str(rule) for rule in admissible_rules(region.uses[-1], num_shards).rules]


def table(name):
    cases = {case[0]: case for group in rule_cases.GROUPS.values() for case in group}
    _, function, values = cases[name]
    return rules_of(function, *values)


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("dot_general", ["S(0), B -> S(0)", "B, S(1) -> S(1)", "S(1), S(0) -> P",
                         "P, B -> P", "B, P -> P", "B, B -> B"]),
        ("add", ["S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "P, P -> P", "B, B -> B"]),
        ("add sizes of 1", ["S(0), B -> S(0)", "B, S(1) -> S(1)", "P, P -> P",
                            "B, B -> B"]),
        ("neg", ["S(0) -> S(0)", "S(1) -> S(1)", "P -> P", "B -> B"]),
        ("tanh", ["S(0) -> S(0)", "S(1) -> S(1)", "B -> B"]),
        ("reduce_sum", ["S(0) -> S(0)", "S(1) -> P", "P -> P", "B -> B"]),
        ("reduce_max", ["S(0) -> S(0)", "S(1) -> B by max", "B -> B"]),
        ("gather", ["B, S(0) -> S(0)", "S(1), B -> S(1)", "S(0), B -> P", "P, B -> P",
                    "B, B -> B"]),
        ("scatter-add", ["S(0), B, B -> S(0)", "S(1), B, S(1) -> S(1)",
                         "P, S(0), S(0) -> P", "P, B, P -> P", "B, B, B -> B"]),
        ("conv_general_dilated", ["S(0), B -> S(0)", "B, S(0) -> S(1)",
                                  "S(1), S(1) -> P", "P, B -> P", "B, P -> P",
                                  "B, B -> B"]),
        ("squeeze", ["S(0) -> S(0)", "S(2) -> S(1)", "P -> P", "B -> B"]),
        ("select_n of bools", ["S(0), S(0), S(0) -> S(0)", "S(1), S(1), S(1) -> S(1)",
                               "B, B, B -> B"]),
    ],
)  # fmt: skip
def test_rules_read_as_expected(name, rules):
    assert table(name) == rules


@pytest.mark.parametrize(
    ("name", "is_partial"),
    [
        ("div", True),
        ("convert_element_type", True),
        ("convert ints", True),
        ("convert floats to ints", False),
        ("convert to wider", False),
        ("gather with a fill", True),
        ("gather with a fill of ints", False),
        ("bitcast_convert_type", False),
        ("reverse is additive: rev", True),
        ("concatenate bools", False),
        ("cumsum", True),
        ("cumprod", False),
    ],
)
def test_only_additive_operations_pass_partial_sums(name, is_partial):
    rules = table(name.rpartition(": ")[2])
    assert any(rule.startswith("P") for rule in rules) == is_partial


def test_integer_division_does_not_pass_partial_sums():
    x = np.ones((4, 8), np.int32)
    assert rules_of(jax.lax.div, x, x) == [
        "S(0), S(0) -> S(0)",
        "S(1), S(1) -> S(1)",
        "B, B -> B",
    ]


# Which splits a reshape keeps, on axes of these sizes, as (before, after).
RESHAPES = [
    ((4,), (2, 2), (2, 2), "S(0),S(0)", "S(0),S(1)"),
    ((2, 4), (8,), (2, 2), "S(0),S(1)", "S(0),S(0)"),
    ((3, 2, 3, 5), (3, 30), (2, 3), "S(1),S(2)", "S(1),S(1)"),
    ((12,), (2, 2, 3), (2, 2), "S(0),S(0)", "S(0),S(1)"),
    ((8, 2), (2, 4, 2), (2, 2), "S(0),S(0)", "S(0),S(1)"),
    ((8, 4), (2, 4, 4), (2, 2), "S(0),S(0)", "S(0),S(1)"),
    ((4, 3), (3, 4), (2, 3), "S(0),S(1)", None),
    ((9, 9, 8), (81, 8), (3, 1), "S(0),B", "S(0),B"),
    ((9, 9, 8), (81, 8), (2, 1), "S(0),B", None),
    ((8, 16, 24), (64, 6, 8), (2, 2), "S(0),P", "S(0),P"),
]


@pytest.mark.parametrize(("source", "target", "sizes", "before", "after"), RESHAPES)
def test_reshape_keeps_splits_at_the_head_of_a_group(
    source, target, sizes, before, after
):
    use = trace(lambda x: x.reshape(target), np.ones(source, np.float32))[0].uses[0]
    result = []
    for component, size in zip(parse(before), sizes, strict=True):
        rule = admissible_rules(use, size).exact.get((component,))
        if rule is None:
            assert after is None
            return
        result += rule.outputs
        use = cut_use(use, rule, size)
    assert tuple(result) == parse(after)


def cut_use(use, rule, size):
    def cut_shape(shape, component):
        dim = getattr(component, "dim", None)
        return tuple(n // size if d == dim else n for d, n in enumerate(shape))

    return Use(
        name=use.name,
        shapes=tuple(map(cut_shape, use.shapes, rule.inputs)),
        dtypes=use.dtypes,
        outputs=tuple(map(cut_shape, use.outputs, rule.outputs)),
        params=use.params,
    )


def test_a_dim_that_does_not_divide_is_not_split():
    x = np.ones((6, 4), np.float32)
    assert rules_of(jax.lax.tanh, x, num_shards=4) == ["S(1) -> S(1)", "B -> B"]


def test_an_unknown_primitive_is_computed_everywhere():
    use = Use(name="cholesky", shapes=((4, 4),), dtypes=(None,), outputs=((4, 4),))
    assert [str(rule) for rule in admissible_rules(use, 2).rules] == ["B -> B"]
