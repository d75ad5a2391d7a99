import pickle
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import sbp


def test_placement_keeps_the_order_of_ranks():
    placement = sbp.placement("cpu", [[0, 3], [1, 2]], ("data", "tensor"))
    devices = jax.devices()
    assert placement.mesh.devices.tolist() == [
        [devices[0], devices[3]],
        [devices[1], devices[2]],
    ]
    assert placement != sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
    assert placement.shape == (2, 2)
    assert placement.size == 4
    assert placement.axis_sizes == {"data": 2, "tensor": 2}


def test_placement_is_a_value():
    placement = sbp.placement("cpu", [[0, 1], [2, 3]])
    assert placement == sbp.placement("cpu", np.array([[0, 1], [2, 3]]))
    assert placement == pickle.loads(pickle.dumps(placement))
    assert hash(placement) == hash(sbp.placement("cpu", ((0, 1), (2, 3))))
    assert placement != sbp.placement("cpu", [0, 1, 2, 3])
    assert placement != sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
    assert eval(repr(placement), {"sbp": sbp}) == placement
    with pytest.raises(AttributeError):
        placement.type = "gpu"


@pytest.mark.parametrize(
    ("ranks", "shape", "names"),
    [
        (3, (1,), ("x",)),
        (range(4), (4,), ("x",)),
        ([[0, 1]], (1, 2), ("x", "y")),
        ([[[0], [1]]], (1, 2, 1), ("x", "y", "z")),
        ([[[[5]]]], (1, 1, 1, 1), ("axis_0", "axis_1", "axis_2", "axis_3")),
    ],
)
def test_ranks_of_any_nesting_give_shape_and_names(ranks, shape, names):
    placement = sbp.placement("cpu", ranks)
    assert (placement.shape, placement.axis_names) == (shape, names)
    assert placement.mesh.axis_types == (AxisType.Explicit,) * len(shape)


def test_rank_is_a_position_not_a_device_id(monkeypatch):
    """As with several processes, whose CPU devices have the ids 0, 2048, ..."""
    devices = jax.devices()[4:]
    assert [d.id for d in devices] == [4, 5, 6, 7]
    monkeypatch.setattr(jax, "devices", lambda platform=None: devices)
    placement = sbp.placement("cpu", [1, 0], ("only_here",))
    assert placement.mesh.devices.tolist() == [devices[1], devices[0]]
    assert sbp.Placement.from_mesh(placement.mesh) == placement


def test_mesh_with_auto_axes_has_the_same_devices():
    placement = sbp.placement("cpu", [[0, 1], [2, 3]])
    auto = placement.mesh_with(AxisType.Auto)
    assert auto.axis_types == (AxisType.Auto,) * 2
    assert auto.devices.tolist() == placement.devices.tolist()


def test_all_takes_every_device():
    assert sbp.placement.all("cpu").ranks == tuple(range(8))
    placement = sbp.placement.all("cpu", (2, 4), ("data", "tensor"))
    assert placement.ranks == ((0, 1, 2, 3), (4, 5, 6, 7))
    with pytest.raises(ValueError, match=r"needs 6 devices, but there are 8"):
        sbp.placement.all("cpu", (2, 3))


def test_along_gives_the_placement_of_a_stage():
    placement = sbp.placement("cpu", [[[0, 1]], [[2, 3]]], ("stage", "data", "tensor"))
    stage = placement.along("stage", 1)
    assert stage == sbp.placement("cpu", [[2, 3]], ("data", "tensor"))
    assert placement.along("tensor", -1).ranks == ((1,), (3,))
    assert sbp.placement("cpu", [4, 5]).along("x", 1) == sbp.placement("cpu", [5])


def test_along_names_axis_and_range():
    placement = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
    with pytest.raises(ValueError, match="Did you mean 'data'"):
        placement.along("dta", 0)
    with pytest.raises(ValueError, match="axis 'data', which has 2 devices"):
        placement.along("data", 2)


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        ([0, 0], ValueError, r"names rank 0 more than once"),
        ([0, -1], ValueError, r"names rank -1, but ranks count from 0"),
        (
            [7, 8],
            ValueError,
            r"names rank 8, but there are 8 cpu devices, ranks 0 to 7",
        ),
        ([], ValueError, r"names no rank"),
        ([[0, 1], [2]], ValueError, r"rows have different lengths"),
        ([0.0, 1.0], TypeError, r"these have type float64"),
        (["0"], TypeError, r"these have type"),
        ([True, False], TypeError, r"these have type bool"),
        (None, TypeError, r"these have type object"),
    ],
)
def test_bad_ranks_are_errors_that_name_them(ranks, error, message):
    with pytest.raises(error, match=message) as raised:
        sbp.placement("cpu", ranks)
    assert repr(ranks) in str(raised.value)


def test_too_large_a_rank_says_how_to_get_more_devices():
    with pytest.raises(ValueError, match="jax_num_cpu_devices', 12") as error:
        sbp.placement("cpu", [11])
    assert "launch.run --nproc 12" in str(error.value)


@pytest.mark.parametrize("device_type", ["cude", "", None, 3])
def test_unknown_device_type_lists_the_types(device_type):
    with pytest.raises(ValueError, match="the types are 'cpu', 'gpu', 'cuda'"):
        sbp.placement(device_type, [0])


def test_device_type_without_devices_says_what_there_is():
    with pytest.raises(ValueError, match="no tpu device: JAX found only cpu"):
        sbp.placement("tpu", [0])


def test_cuda_is_read_as_gpu(monkeypatch):
    fake = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "devices", lambda platform=None: [fake])
    assert sbp.placement("cuda", [0]) == sbp.placement("gpu", [0])


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("data",), ValueError, r"has 1 names, but ranks of shape \(2, 2\) have 2"),
        (("data", "data"), ValueError, "repeats a name"),
        (("data", 1), TypeError, "1 is not a name"),
        (("data", ""), TypeError, "'' is not a name"),
    ],
)
def test_bad_axis_names_are_errors(names, error, message):
    with pytest.raises(error, match=message):
        sbp.placement("cpu", [[0, 1], [2, 3]], names)
