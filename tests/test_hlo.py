"""The reader of compiled programs reads what it is meant to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tests import hlo

SIZES = {"stage": 2, "data": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={}", ()),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}",
            ((3, 2), (1, 0)),
        ),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    ],
)
def test_groups_are_read_in_every_form(text, groups):
    assert (
        hlo.parse_groups(f"%x = f32[4]{{0}} all-reduce(%y), {text}, x={{}}") == groups
    )


def test_unknown_form_of_groups_is_an_error():
    with pytest.raises(ValueError, match="No groups of a known form"):
        hlo.parse_groups("replica_groups=<new>")


def test_collectives_of_a_program_with_loop_and_branches(devices):
    mesh = Mesh(
        np.array(devices).reshape(2, 2, 2),
        tuple(SIZES),
        axis_types=(AxisType.Auto,) * 3,
    )

    def body(x, _):
        x = jax.lax.ppermute(x, "stage", [(0, 1), (1, 0)])
        is_first = jax.lax.axis_index("stage") == 0
        y = jax.lax.cond(
            is_first,
            lambda: jax.lax.pcast(jax.lax.psum(x, "tensor"), "tensor", to="varying"),
            lambda: x,
        )
        return y, None

    def run(x):
        x, _ = jax.lax.scan(body, x, length=5)
        return jax.lax.psum(x, ("stage", "data")), jax.lax.all_gather(x, "data")

    program = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=P("stage", "data", "tensor"),
            out_specs=(P(None, None, "tensor"), P("stage", None, "data", "tensor")),
        )
    )
    text = program.lower(jnp.ones((2, 2, 8))).compile().as_text()
    found = {
        (c.name, c.axes(SIZES), tuple(loop.trips for loop in c.loops), c.conditionals)
        for c in hlo.collectives(text)
    }
    assert found == {
        ("collective-permute", ("stage",), (5,), 0),
        ("all-reduce", ("tensor",), (5,), 1),
        ("all-reduce", ("stage", "data"), (), 0),
        ("all-gather", ("data",), (), 0),
    }
    sizes = {c.name: c.num_bytes for c in hlo.collectives(text)}
    assert sizes["all-gather"] == 2 * 4 * 4
    assert sizes["collective-permute"] == 4 * 4


def test_asynchronous_collectives_count_results_alone():
    program = """ENTRY main (p: f32[8]) -> f32[2] {
  %rs = ((f32[8]{0}), (f32[2]{0})) reduce-scatter-start(%p), replica_groups={{0,1}}
  %ag = (f32[2]{0}, f32[8]{0}) all-gather-start(%q), replica_groups={{0,1}}
}"""
    assert [c.num_bytes for c in hlo.collectives(program)] == [8, 32]
