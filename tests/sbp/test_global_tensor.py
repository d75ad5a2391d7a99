"""Concrete conversions with their values, one by one."""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sbp

A = np.array(
    [
        [[4, 6, 5, 20], [6, 8, 9, 0], [3, 7, 5, 0], [6, 8, 9, 0]],
        [[2, 10, 10, 7], [3, 9, 10, 5], [4, 6, 6, 9], [6, 8, 6, 4]],
        [[9, 6, 5, 8], [4, 9, 7, 0], [2, 5, 7, 9], [6, 8, 10, 0]],
        [[9, 4, 5, 8], [7, 2, 9, 5], [6, 3, 9, 2], [3, 7, 5, 8]],
    ],
    np.int32,
)
ROWS_01 = np.concatenate(A[:2])


def line(*ranks):
    return sbp.placement("cpu", list(ranks))


def convert(source_ranks, source, target_ranks, target):
    """Local tensors of the ranks, made global, converted, made local again."""
    placement = line(*source_ranks)
    shards = {rank: A[rank] for rank in source_ranks}
    if source == "B":
        shards = dict.fromkeys(source_ranks, A[source_ranks[0]])
    if source == "S(1)" and len(source_ranks) == 2:  # the same logical 8x4 tensor
        shards = dict(zip(source_ranks, np.split(ROWS_01, 2, axis=1), strict=True))
    x = sbp.from_local(shards, placement, sbp.parse(source))
    y = sbp.to_global(x, line(*target_ranks), sbp.parse(target))
    assert sbp.placement_of(y) == line(*target_ranks)
    return {rank: shard.tolist() for rank, shard in sbp.to_local(y).items()}


COLUMNS_0_1 = [[4, 6], [6, 8], [3, 7], [6, 8], [2, 10], [3, 9], [4, 6], [6, 8]]
COLUMNS_2_3 = [[5, 20], [9, 0], [5, 0], [9, 0], [10, 7], [10, 5], [6, 9], [6, 4]]
PADDED_RIGHT = [[*row, 0, 0] for row in COLUMNS_0_1]
PADDED_LEFT = [[0, 0, *row] for row in COLUMNS_2_3]
CASES = {
    "P to S(1), disjoint": (
        ([0, 1], "P", [2, 3], "S(1)"),
        {
            2: [[6, 16], [9, 17], [7, 13], [12, 16]],
            3: [[15, 27], [19, 5], [11, 9], [15, 4]],
        },
    ),
    "B to S(1), disjoint": (
        ([0, 1], "B", [2, 3], "S(1)"),
        {2: [[4, 6], [6, 8], [3, 7], [6, 8]], 3: [[5, 20], [9, 0], [5, 0], [9, 0]]},
    ),
    "S(0) to S(1), disjoint": (
        ([0, 1], "S(0)", [2, 3], "S(1)"),
        {2: COLUMNS_0_1, 3: COLUMNS_2_3},
    ),
    "S(1) to S(0), disjoint": (
        ([0, 1], "S(1)", [2, 3], "S(0)"),
        {2: A[0].tolist(), 3: A[1].tolist()},
    ),
    "S(1) to B, disjoint": (
        ([0, 1], "S(1)", [2, 3], "B"),
        {2: ROWS_01.tolist(), 3: ROWS_01.tolist()},
    ),
    "S(1) to P, disjoint": (
        ([0, 1], "S(1)", [2, 3], "P"),
        {2: PADDED_RIGHT, 3: PADDED_LEFT},
    ),
    "P to S(1), overlapping": (
        ([0, 1, 3], "P", [2, 3], "S(1)"),
        {
            2: [[15, 20], [16, 19], [13, 16], [15, 23]],
            3: [[20, 35], [28, 10], [20, 11], [20, 12]],
        },
    ),
    "P to S(1), superset": (
        ([0, 1, 3], "P", [0, 1, 2, 3], "S(1)"),
        {
            0: [[15], [16], [13], [15]],
            1: [[20], [19], [16], [23]],
            2: [[20], [28], [20], [20]],
            3: [[35], [10], [11], [12]],
        },
    ),
    "S(0) to S(1), overlapping": (
        ([0, 1, 3], "S(0)", [2, 3], "S(1)"),
        {
            2: COLUMNS_0_1 + [[9, 4], [7, 2], [6, 3], [3, 7]],
            3: COLUMNS_2_3 + [[5, 8], [9, 5], [9, 2], [5, 8]],
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_conversion_between_placements(name):
    arguments, expected = CASES[name]
    assert convert(*arguments) == expected


@pytest.mark.parametrize(
    ("target", "columns"),
    [
        ([0, 1, 2, 3], {0: [0, 1], 1: [2, 3], 2: [], 3: [4, 5]}),
        ([2, 3], {2: [0, 1], 3: [2, 3, 4, 5]}),
    ],
)
def test_split_to_partial_sum_fills_with_zeros_where_a_rank_holds_nothing(
    target, columns
):
    value = np.arange(1, 73, dtype=np.int32).reshape(12, 6)
    x = sbp.to_global(value, line(0, 1, 3), sbp.split(1))
    local = sbp.to_local(sbp.to_global(x, line(*target), sbp.partial_sum))
    for rank, kept in columns.items():
        expected = np.zeros_like(value)
        expected[:, kept] = value[:, kept]
        np.testing.assert_array_equal(local[rank], expected)


def test_one_axis_to_two_axes_and_back():
    square = sbp.placement("cpu", [[0, 1], [2, 3]])
    value = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    x = sbp.to_global(value, line(0, 1, 2, 3), sbp.split(0))
    y = sbp.to_global(x, square, (sbp.broadcast, sbp.split(0)))
    halves = {0: value[:2], 1: value[2:], 2: value[:2], 3: value[2:]}
    assert all((sbp.to_local(y)[rank] == halves[rank]).all() for rank in halves)
    z = sbp.to_global(y, line(0, 1, 2, 3), sbp.split(0))
    assert {shard.shape for shard in sbp.to_local(z).values()} == {(1, 8)}
    np.testing.assert_array_equal(z, value)


def test_booleans_and_tiny_floats_travel_too():
    square = sbp.placement("cpu", [[0, 1], [2, 3]])
    for dtype in (bool, ml_dtypes.float8_e4m3fn, np.uint32):
        value = (np.arange(16) % 3).reshape(4, 4).astype(dtype)
        x = sbp.to_global(value, square, sbp.parse("S(0),S(1)"))
        y = sbp.to_global(x, sbp=sbp.parse("S(1),S(0)"))
        z = sbp.to_global(y, line(5, 1), sbp.split(0))
        assert (sbp.full_value(y) == value).all()
        assert (sbp.full_value(z) == value).all()
        assert z.dtype == dtype


def test_one_rank_to_a_square_and_back():
    square = sbp.placement("cpu", [[0, 1], [2, 3]])
    x = sbp.tensor([1, 2, 3, 4], line(0), sbp.broadcast)
    y = sbp.to_global(x, square, (sbp.broadcast, sbp.split(0)))
    local = {rank: shard.tolist() for rank, shard in sbp.to_local(y).items()}
    assert local == {0: [1, 2], 1: [3, 4], 2: [1, 2], 3: [3, 4]}
    assert sbp.to_local(sbp.to_global(y, line(0), sbp.broadcast))[0].tolist() == [
        1,
        2,
        3,
        4,
    ]


def test_devices_of_another_type_are_reached_through_their_own_transfer(monkeypatch):
    """Here they are CPU devices in disguise: only the placement says otherwise."""
    monkeypatch.setattr(
        sbp.Placement, "from_mesh", lambda mesh: types.SimpleNamespace(type="gpu")
    )
    value = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    x = sbp.to_global(value, line(0, 1), sbp.partial_sum)
    y = sbp.to_global(x, line(2, 3), sbp.split(0))
    z = sbp.to_global(y, line(4, 5), sbp.partial_sum)
    monkeypatch.undo()
    for moved, placement in ((y, line(2, 3)), (z, line(4, 5))):
        assert sbp.placement_of(moved) == placement
        np.testing.assert_array_equal(sbp.full_value(moved), value)


def test_order_of_ranks_decides_who_holds_what():
    placement = sbp.placement("cpu", [[0, 3], [1, 2]], ("data", "tensor"))
    value = np.arange(16).reshape(4, 4)
    x = sbp.to_global(value, placement, sbp.parse("S(0),S(1)"))
    local = sbp.to_local(x)
    np.testing.assert_array_equal(local[3], value[:2, 2:])
    np.testing.assert_array_equal(local[1], value[2:, :2])


def test_a_matching_tensor_is_returned_itself():
    placement = sbp.placement("cpu", [[0, 1], [2, 3]])
    x = sbp.to_global(np.ones((4, 4)), placement, sbp.parse("S(0),P"))
    assert sbp.to_global(x, placement, sbp.parse("S(0),P")) is x
    assert sbp.to_global(x, sbp=sbp.parse("S(-2),P")) is x
    assert sbp.to_global(x) is x


def test_mapping_of_axis_names_to_components():
    placement = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
    x = sbp.to_global(np.ones((4, 4)), placement, {"tensor": sbp.split(-1)})
    assert str(jax.typeof(x)) == "float32[4,4@tensor]"
    assert sbp.signature_of(x) == (sbp.broadcast, sbp.split(1))


def test_other_placement_keeps_the_signature():
    x = sbp.to_global(np.arange(4), line(0, 1), sbp.split(0))
    y = sbp.to_global(x, line(5, 4))
    assert sbp.signature_of(y) == (sbp.split(0),)
    assert sbp.to_local(y)[5].tolist() == [0, 1]


def test_array_on_an_auto_mesh_gets_its_signature_into_its_type():
    placement = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
    auto = NamedSharding(placement.mesh_with(AxisType.Auto), P("data"))
    x = jax.device_put(np.arange(8.0, dtype=np.float32), auto)
    y = sbp.to_global(x)
    assert str(jax.typeof(y)) == "float32[8@data]"
    assert sbp.placement_of(x) == placement
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("value", [3.0, [[1, 2], [3, 4]], np.float64(2), True])
def test_python_and_numpy_values_become_jax_s_dtypes(value):
    x = sbp.to_global(value, line(0, 1), sbp.broadcast)
    assert x.dtype == jnp.asarray(value).dtype
    np.testing.assert_array_equal(x, np.asarray(value))


def test_inside_jit_signature_and_shape_of_the_mesh_can_change():
    square = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
    value = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    x = sbp.to_global(value, line(0, 1, 2, 3), sbp.split(0))
    y = jax.jit(lambda x: sbp.to_global(2 * x, square, sbp.parse("B,S(1)")))(x)
    assert str(jax.typeof(y)) == "float32[4,4@tensor]"
    assert sbp.placement_of(y) == square
    np.testing.assert_array_equal(y, 2 * value)


@pytest.mark.parametrize("source", ["S(0)", "B", "P"])
def test_one_device_has_every_signature(source):
    line, square = sbp.placement("cpu", [3]), sbp.placement("cpu", [[3]])
    value = np.arange(35.0, dtype=np.float32).reshape(7, 5)
    x = sbp.to_global(value, line, sbp.parse(source))
    for target in ("S(1)", "B", "P"):
        y = sbp.to_global(x, sbp=sbp.parse(target))
        assert sbp.signature_of(y) == sbp.parse(target)
        np.testing.assert_array_equal(sbp.full_value(y), value)
        z = jax.jit(lambda y: sbp.to_global(y, square, sbp.parse("P,S(0)")))(y)
        assert sbp.signature_of(z) == sbp.parse("P,S(0)")
        np.testing.assert_array_equal(sbp.full_value(z), value)


def test_axes_of_one_device_cost_nothing():
    row = sbp.placement("cpu", [[0, 1]])
    for source in ("S(0),B", "P,B"):
        for target in ("B,B", "S(1),B", "P,B"):
            ends = sbp.parse(source), sbp.parse(target)
            plan = sbp.plan(*ends, (4, 4), "int32", row)
            assert (plan.collectives, plan.num_bytes) == ((), 0)
    x = sbp.to_global(np.ones((4, 4)), row, sbp.parse("P,S(0)"))
    assert sbp.full_value(sbp.to_global(x, sbp=sbp.parse("S(0),P"))).tolist() == (
        np.ones((4, 4)).tolist()
    )


def test_inside_jit_a_plain_value_can_become_global():
    placement = line(0, 1)
    y = jax.jit(lambda: sbp.to_global(np.arange(4), placement, sbp.split(0)))()
    assert str(jax.typeof(y)) == "int32[4@x]"
    assert y.tolist() == [0, 1, 2, 3]


def test_inside_jit_a_mesh_may_be_set():
    placement = sbp.placement("cpu", [[0, 1], [2, 3]])
    x = sbp.to_global(np.ones((4, 4)), placement, sbp.parse("S(0),P"))
    with jax.set_mesh(placement.mesh):
        y = jax.jit(lambda x: sbp.to_global(x, sbp=sbp.parse("B,S(1)")))(x)
        z = sbp.to_global(x, line(4, 5), sbp.split(0))
    assert str(jax.typeof(y)) == "float32[4,4@y]"
    assert str(jax.typeof(z)) == "float32[4@x,4]"


def test_scan_and_vmap_go_through_conversions():
    placement = line(0, 1)
    value = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    x = sbp.to_global(value, placement, sbp.split(1))

    def gather(row):
        return sbp.to_global(row, sbp=sbp.broadcast)

    assert str(jax.typeof(jax.vmap(gather)(x))) == "float32[2,4]"

    def step(carry, row):
        return carry + gather(row), None

    total, _ = jax.jit(lambda x: jax.lax.scan(step, 0 * gather(x[0]), x))(x)
    np.testing.assert_array_equal(total, value.sum(0))


def test_vmap_over_a_split_dim_keeps_it_split():
    placement = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
    value = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    x = sbp.to_global(value, placement, sbp.parse("S(0),S(1)"))
    y = jax.vmap(lambda row: sbp.to_global(row, sbp={"tensor": sbp.partial_sum}))(x)
    assert str(jax.typeof(y)) == "float32[4@data,8]{U:tensor}"
    np.testing.assert_array_equal(sbp.full_value(y), value)
    with pytest.raises(
        ValueError, match="split along mesh axis 'data', so that inside"
    ):
        jax.vmap(lambda row: sbp.to_global(row, sbp={"data": sbp.split(0)}))(x)


def test_constrain_follows_the_mesh():
    placement = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
    row = {"tensor": sbp.split(1)}

    @jax.jit
    def double(x):
        return sbp.constrain(2 * x, row)

    plain = np.ones((4, 4), np.float32)
    assert (double(plain) == 2).all()
    explicit = double(sbp.to_global(plain, placement, sbp.parse("B,B")))
    assert str(jax.typeof(explicit)) == "float32[4,4@tensor]"
    with jax.set_mesh(placement.mesh_with(AxisType.Auto)):
        assert double(plain).sharding.spec == P(None, "tensor")
