import pytest
from jax.sharding import PartitionSpec as P

import sbp
from sbp import spec
from tests.sbp import numpy_model
from tests.sbp.conversion import to_signature

AXES = ("data", "tensor")


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("B,B", P()),
        ("S(0),B", P("data")),
        ("B,S(1)", P(None, "tensor")),
        ("S(1),S(0)", P("tensor", "data")),
        ("S(0),S(0)", P(("data", "tensor"))),
        ("S(0),P", P("data", unreduced={"tensor"})),
        ("P,P", P(unreduced={"data", "tensor"})),
    ],
)
def test_signature_to_spec(signature, expected):
    assert spec.to_partition_spec(sbp.parse(signature), AXES) == expected


@pytest.mark.parametrize("signature", numpy_model.signatures(2), ids="-".join)
def test_every_signature_survives_the_round_trip(signature):
    signature = to_signature(signature)
    there = spec.to_partition_spec(signature, AXES)
    assert spec.from_partition_spec(there, AXES) == signature


def test_spec_in_another_order_than_the_mesh_is_no_signature():
    with pytest.raises(ValueError, match="splits in mesh order, which is"):
        spec.from_partition_spec(P(("tensor", "data")), AXES)


def test_spec_with_unknown_axis_names_the_closest():
    with pytest.raises(ValueError, match="Did you mean 'tensor'"):
        spec.from_partition_spec(P("tensr"), AXES)


def test_negative_dims_have_to_be_resolved_first():
    with pytest.raises(ValueError, match="has a negative dim"):
        spec.to_partition_spec((sbp.split(-1), sbp.broadcast), AXES)


def test_table_rows_name_components_by_axis():
    row = spec.signature_by_axis({"tensor": sbp.split(1)}, AXES)
    assert row == (sbp.broadcast, sbp.split(1))
    with pytest.raises(ValueError, match="Did you mean 'data'"):
        spec.signature_by_axis({"dat": sbp.split(1)}, AXES)


def test_to_sharding_uses_the_placement_s_explicit_mesh():
    placement = sbp.placement("cpu", [[3, 1], [2, 0]], AXES)
    sharding = spec.to_sharding(placement, {"tensor": sbp.split(0)})
    assert sharding.mesh == placement.mesh
    assert sharding.spec == P("tensor")


def test_indivisible_dim_names_axis_shape_and_remedy():
    with pytest.raises(ValueError, match="divisible") as error:
        spec.check_divides(sbp.parse("B,S(1)"), {"data": 2, "tensor": 4}, (8, 6))
    assert str(error.value) == (
        "sbp.split(1) on mesh axis 'tensor' cuts dim 1 of shape (8, 6) into 4 shards, "
        "but 6 is not divisible by 4. Pad the dim to 8 (sbp.pad_to does), or use 1, 2, "
        "3 or 6 devices along it."
    )


def test_dim_cut_by_two_axes_names_both():
    with pytest.raises(
        ValueError, match="axes 'data' and 'tensor' cuts dim 0"
    ) as error:
        spec.check_divides(sbp.parse("S(0),S(0)"), {"data": 2, "tensor": 4}, (2, 6))
    assert "into 8 shards" in str(error.value)
    assert "Pad the dim to 8" in str(error.value)


def test_local_shape_and_num_shards():
    signature = sbp.parse("S(0),S(1),S(0)")
    assert spec.num_shards(signature, (2, 3, 4), 3) == (8, 3, 1)
    assert spec.local_shape(signature, (2, 3, 4), (16, 9, 5)) == (2, 3, 5)
