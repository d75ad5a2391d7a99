"""What a caller can get wrong: exceptions at the call, with values and remedy."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import sbp

LINE = sbp.placement("cpu", [0, 1])
SQUARE = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))


@pytest.fixture(scope="module")
def x():
    return sbp.to_global(np.ones((4, 4), np.float32), SQUARE, sbp.parse("S(0),B"))


def calls_with(signature):
    """Every function that takes a placement and a signature."""
    value = np.ones((4, 4), np.float32)
    given = {"placement": SQUARE, "sbp": signature}
    return {
        "to_global": lambda: sbp.to_global(value, SQUARE, signature),
        "to_global of global": lambda: sbp.to_global(
            sbp.ones((4, 4), placement=SQUARE, sbp=sbp.parse("B,B")), sbp=signature
        ),
        "to_global elsewhere": lambda: sbp.to_global(
            sbp.ones((4, 4), placement=LINE, sbp=sbp.broadcast), SQUARE, signature
        ),
        "from_local": lambda: sbp.from_local([value] * 4, SQUARE, signature),
        "tensor": lambda: sbp.tensor(value, SQUARE, signature),
        "zeros": lambda: sbp.zeros((4, 4), **given),
        "arange": lambda: sbp.eye(4, **given),
        "randn": lambda: sbp.randn((4, 4), seed=0, **given),
        "plan": lambda: sbp.plan(
            signature, sbp.parse("B,B"), (4, 4), "float32", SQUARE
        ),
        "pad_to": lambda: sbp.pad_to(value, SQUARE, signature),
        "balanced_slices": lambda: sbp.balanced_slices((4, 4), SQUARE, signature),
    }


BAD = {
    "too few": (
        (sbp.split(0),),
        ValueError,
        "has 1 component, but the placement has 2",
    ),
    "single": (
        sbp.split(0),
        ValueError,
        "has 1 component, but the placement has 2 axes",
    ),
    "too many": ((sbp.broadcast,) * 3, ValueError, "has 3 components, but"),
    "empty": ([], ValueError, "has 0 components, but the placement has 2 axes"),
    "dim out of range": (
        (sbp.split(2), sbp.broadcast),
        ValueError,
        r"sbp.split\(2\) on mesh axis 'data' names a dim that a tensor of 2 dims",
    ),
    "negative dim": (
        (sbp.split(-3), sbp.broadcast),
        ValueError,
        r"sbp.split\(-3\) on mesh axis 'data' names a dim",
    ),
    "unknown axis": ({"tensr": sbp.split(0)}, ValueError, "Did you mean 'tensor'"),
    "string": ("S(0),B", TypeError, r"To read the short form, write sbp.parse"),
    "no component": ((0, 1), TypeError, "but got 0 of type int"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("function", calls_with(None))
def test_bad_signature(function, case):
    signature, error, message = BAD[case]
    with pytest.raises(error, match=message):
        calls_with(signature)[function]()


@pytest.mark.parametrize("shape", [(3, 4), (1, 4)])
def test_a_dim_that_does_not_divide_or_is_too_short(shape):
    with pytest.raises(ValueError, match=f"{shape[0]} is not divisible by 2"):
        sbp.to_global(np.ones(shape), SQUARE, sbp.parse("S(0),B"))


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({}, "placement and sbp"),
        ({"placement": SQUARE}, "sbp"),
        ({"sbp": sbp.parse("B,B")}, "placement"),
    ],
)
def test_a_plain_value_needs_placement_and_sbp(arguments, missing):
    with pytest.raises(ValueError, match=f"on no mesh, without {missing}. .*give both"):
        sbp.to_global(np.ones(4), **arguments)


@pytest.mark.parametrize("value", ["abc", {"a": 1}, [None], np.array(["x"])])
def test_what_is_no_array_of_numbers(value):
    with pytest.raises(TypeError, match="takes arrays of numbers, but got"):
        sbp.to_global(value, LINE, sbp.broadcast)


@pytest.mark.parametrize("function", [sbp.signature_of, sbp.placement_of, sbp.to_local])
def test_questions_to_a_tensor_that_is_not_global(function):
    with pytest.raises(TypeError, match=r"ndarray of shape \(4,\) is on no mesh"):
        function(np.ones(4))
    with pytest.raises(TypeError, match=r"sbp.to_global\(x, placement, sbp\)"):
        function(jax.numpy.ones(4))


def test_questions_that_only_have_answers_outside_of_jit(x):
    with pytest.raises(TypeError, match="is not known while jit traces it"):
        jax.jit(sbp.placement_of)(x)
    with pytest.raises(
        TypeError, match="while it is traced, where there are no shards"
    ):
        jax.jit(sbp.to_local)(x)
    with pytest.raises(TypeError, match="is not known while jit traces it"):
        jax.jit(lambda x: (sbp.show(x), x)[1])(x)
    with pytest.raises(TypeError, match="got shards that jit traces"):
        jax.jit(lambda x: sbp.from_local([x, x], LINE, sbp.broadcast))(np.ones(2))


def test_keeping_a_signature_on_a_placement_with_other_axes(x):
    with pytest.raises(ValueError, match=r"\(S\(0\), B\) has 2 components and the pl"):
        sbp.to_global(x, LINE)


def test_moves_that_jit_cannot_make(x):
    with pytest.raises(ValueError, match="on 4 devices cannot move to 2 inside jit"):
        jax.jit(lambda x: sbp.to_global(x, LINE, sbp.split(0)))(x)
    reordered = sbp.placement("cpu", [[1, 0], [2, 3]], ("data", "tensor"))
    with pytest.raises(ValueError, match=r"device ids \[1, 0, 2, 3\]"):
        jax.jit(lambda x: sbp.to_global(x, reordered, sbp.parse("S(1),B")))(x)
    other_axes = sbp.placement("cpu", [[1, 0, 2, 3]])
    with pytest.raises(ValueError, match=r"device ids \[1, 0, 2, 3\]"):
        jax.jit(lambda x: sbp.to_global(x, other_axes, sbp.parse("B,S(0)")))(x)
    line = sbp.placement("cpu", [0, 1, 2, 3])
    with (
        jax.set_mesh(SQUARE.mesh),
        pytest.raises(ValueError, match="inside jit while a mesh is set"),
    ):
        jax.jit(lambda x: sbp.to_global(x, line, sbp.split(0)))(x)


def test_two_placements_in_one_operation_name_the_devices(x):
    with pytest.raises(ValueError, match="Mesh for all inputs should be equal"):
        x + sbp.ones((4, 4), placement=LINE, sbp=sbp.broadcast)
    reordered = sbp.placement("cpu", [[1, 0], [2, 3]], ("data", "tensor"))
    with pytest.raises(ValueError, match=r"ids \[0, 1, 2, 3\].*ids \[1, 0, 2, 3\]"):
        x + sbp.ones((4, 4), placement=reordered, sbp=sbp.parse("S(0),B"))


def test_auto_axes_have_no_signature_in_the_type():
    auto = jax.device_put(
        np.ones((4, 4)), jax.NamedSharding(SQUARE.mesh_with(AxisType.Auto), jax.P())
    )
    with pytest.raises(ValueError, match="axes are not all Explicit.*sbp.constrain"):
        jax.jit(lambda x: sbp.to_global(x, sbp=sbp.parse("S(0),B")))(auto)
    with (
        jax.set_mesh(SQUARE.mesh_with(AxisType.Auto)),
        pytest.raises(ValueError, match="Auto, where the compiler keeps partial sums"),
    ):
        jax.jit(lambda x: sbp.constrain(x, {"tensor": sbp.partial_sum}))(auto)


def test_shards_inside_shard_map_are_not_global(x):
    def inside(shard):
        return sbp.to_global(shard, sbp={"tensor": sbp.split(0)})

    mapped = jax.shard_map(
        inside, mesh=SQUARE.mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
    )
    with pytest.raises(ValueError, match="one device's shard inside jax.shard_map"):
        mapped(x)


def test_bad_signature_inside_jit_is_the_same_error(x):
    with pytest.raises(ValueError, match="has 1 component, but the placement has 2"):
        jax.jit(lambda x: sbp.to_global(x, sbp=sbp.split(0)))(x)
    with pytest.raises(ValueError, match="names a dim that a tensor of 2 dims"):
        jax.jit(lambda x: sbp.to_global(x, sbp={"data": sbp.split(2)}))(x)


def test_grad_sbp_must_fit_the_placement_of_the_tensor(x):
    with pytest.raises(ValueError, match="has 1 component, but the placement has 2"):
        sbp.to_global(x, LINE, sbp.split(0), grad_sbp=sbp.split(0))
    y = sbp.ones((8, 4), placement=sbp.placement.all("cpu"), sbp=sbp.split(0))
    with pytest.raises(ValueError, match="4 is not divisible by 8"):
        sbp.to_global(y, sbp=sbp.broadcast, grad_sbp=sbp.split(1))
    with pytest.raises(ValueError, match="on no mesh either: leave grad_sbp out"):
        sbp.to_global(np.ones(4), LINE, sbp.split(0), grad_sbp=sbp.broadcast)
