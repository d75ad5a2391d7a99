"""`sbp.explain`: what it lists is what the compiled program does."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax
from sharded import place

import sbp
from sbp.signature import parse


@pytest.fixture(scope="module")
def grid():
    return sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))


def mlp(x, up, down):
    h = jax.nn.relu(x @ up)
    return h @ down


def mlp_structs(grid):
    return (
        programs.struct((8, 16), grid, parse("S(0),B")),
        programs.struct((16, 32), grid, parse("B,S(1)")),
        programs.struct((32, 16), grid, parse("B,S(0)")),
    )


def test_two_layers_need_one_all_reduce_and_nothing_is_run(grid):
    explained = sbp.explain(mlp, *mlp_structs(grid))

    assert explained.collectives == {"all-reduce": 1}
    # A (4, 16) piece of float32 over two devices.
    assert explained.num_bytes == 2 * (4 * 16 * 4) // 2
    assert [(r.operation, r.types) for r in explained] == [
        ("dot_general", ("float32[8@data,32@tensor]",)),
        ("max", ("float32[8@data,32@tensor]",)),
        ("dot_general", ("float32[8@data,16]{U:tensor}",)),
        ("result", ("float32[8@data,16]",)),
    ]


def test_records_name_the_line_the_conversion_and_the_collective(grid):
    explained = sbp.explain(mlp, *mlp_structs(grid))
    first, last = explained[0], explained[-1]

    line = mlp.__code__.co_firstlineno + 1
    assert first.source == f"test_explain.py:{line}"
    assert first.inputs == (parse("S(0),B"), parse("B,S(1)"))
    assert first.outputs == (parse("S(0),S(1)"),)
    assert first.conversions == ()
    assert last.conversions == ((parse("S(0),P"), parse("S(0),B")),)
    assert [(c.name, c.axes, c.num_bytes) for c in last.collectives] == [
        ("all-reduce", ("tensor",), 256)
    ]


def test_lines_inside_library_functions_are_those_of_the_caller(grid):
    def function(x):
        return jax.nn.softmax(jnp.take(x, 0, axis=1))

    explained = sbp.explain(function, mlp_structs(grid)[0])

    line = function.__code__.co_firstlineno + 1
    assert {r.source for r in explained} == {f"test_explain.py:{line}"}


def test_it_prints_as_a_table_with_a_total(grid):
    text = str(sbp.explain(mlp, *mlp_structs(grid)))
    header, total = text.splitlines()[2], text.strip().splitlines()[-1]

    assert header.split() == [
        "line", "operation", "inputs", "results", "communication", "bytes"
    ]  # fmt: skip
    assert "(S(0), P) -> (S(0), B)" in text
    assert "all-reduce over tensor" in text
    assert total.split() == ["total", "1", "all-reduce", "256"]
    assert max(map(len, text.splitlines())) <= 140


def test_it_shows_as_html_and_gives_a_list_of_dicts(grid):
    explained = sbp.explain(mlp, *mlp_structs(grid))

    html = explained._repr_html_()
    rows = explained.to_dicts()

    assert html.count("<tr>") == len(explained) + 2  # header and total
    assert "(S(0), P) -&gt; (S(0), B)<br>&nbsp;&nbsp;all-reduce over tensor" in html
    assert [row["operation"] for row in rows] == [r.operation for r in explained]
    assert rows[-1]["num_bytes"] == 256


def test_only_what_communicates(grid):
    explained = sbp.explain(mlp, *mlp_structs(grid))
    assert [r.operation for r in explained.communicating()] == ["result"]
    assert explained.communicating().num_bytes == explained.num_bytes


def test_loops_count_each_turn_and_indent_their_bodies(grid):
    def layers(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, w)[0]

    x = programs.struct((8, 16), grid, parse("S(0),B"))
    w = programs.struct((5, 16, 32), grid, parse("B,S(2)"))
    explained = sbp.explain(layers, x, w)

    assert explained.collectives == {"all-reduce": 5}
    assert explained.num_bytes == 5 * 256
    inner = [r for r in explained if r.depth == 1]
    assert {r.times for r in inner} == {5}
    assert "  dot_general x5" in str(explained)


def test_an_operation_without_rules_says_so(grid):
    x = programs.struct((4, 4), grid, parse("S(0),B"))
    explained = sbp.explain(jnp.linalg.cholesky, x)
    noted = [r.operation for r in explained if r.note]

    assert noted == ["cholesky"]
    assert "no rule: computed everywhere" in str(explained)


def test_an_operation_that_combines_over_devices_lists_its_collective(grid):
    x = programs.struct((4, 8), grid, parse("S(1),S(1)"))
    (record,) = sbp.explain(lambda x: jnp.max(x, 1), x)

    assert [(str(c), c.num_bytes) for c in record.collectives] == [
        ("all-reduce over data and tensor", 2 * (4 * 4) * 3 // 4)
    ]


# Functions whose collectives cannot be merged by the compiler.
PROGRAMS = {
    "mlp": (mlp, ["S(0),B", "B,S(1)", "B,S(0)"]),
    "weights of a fully sharded run": (mlp, ["S(0),B", "S(0),B", "S(0),B"]),
    "everything split wrongly": (mlp, ["S(1),S(0)", "P,S(0)", "S(1),S(1)"]),
    "sums": (
        lambda x, up, down: jnp.sum(x) * jnp.max(up) + down,
        ["S(0),S(1)", "S(1),B", "P,S(0)"],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiled_program_has_just_the_collectives_listed(name, grid):
    function, signatures = PROGRAMS[name]
    rng = np.random.default_rng(0)
    shapes = [(8, 16), (16, 32), (32, 16)]
    values = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    placed = [
        place(value, grid, parse(signature))
        for value, signature in zip(values, signatures, strict=True)
    ]
    jitted = sbp.jit(function)

    explained = sbp.explain(jitted, *placed)

    compiled = programs.compiled_collectives(jitted.lower(*placed))
    assert compiled == explained.collectives
    np.testing.assert_allclose(
        np.asarray(jitted(*placed)), function(*values), rtol=1e-3, atol=1e-3
    )


def test_explaining_without_a_global_tensor_is_an_error():
    with pytest.raises(ValueError, match=r"sbp.jit\(mlp\) got no global tensor"):
        sbp.explain(mlp, *[np.ones((4, 4), np.float32)] * 3)
