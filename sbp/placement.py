"""Placements: on which devices a tensor lives, and how they are arranged.

A placement names *ranks*. The rank of a device is its position in
``jax.devices(type)``, over all processes of the job; it is not ``device.id``, which
need not be consecutive when several processes run. The order in which ranks are
given is the order of the mesh: nothing is sorted.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sbp.signature import did_you_mean

_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}
_DEFAULT_NAMES = ("x", "y", "z")

Ranks = tuple[Any, ...]  # nested to the depth of the placement, ints inside


@dataclasses.dataclass(frozen=True, slots=True, init=False, repr=False)
class Placement:
    """Devices arranged along named axes: a frozen value.

    Written ``sbp.placement(type, ranks, axis_names)``.

    Attributes:
        type: ``'cpu'``, ``'gpu'`` (``'cuda'`` is read as such) or ``'tpu'``.
        ranks: Ranks as nested tuples; their nesting is the shape of the mesh. Any
            nested sequence, range or integer array may be given, a single rank too.
        axis_names: One name per axis. By default ``('x', 'y', 'z')``, as many as
            there are axes, and ``('axis_0', 'axis_1', ...)`` beyond three.

    Raises:
        TypeError: If ``ranks`` does not hold whole numbers.
        ValueError: If the device type is unknown, or ranks are repeated, negative,
            ragged, none at all, or more than there are devices; or if the names
            do not fit the axes.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
        >>> p
        sbp.placement('cpu', ranks=[[0, 1], [2, 3]], axis_names=('data', 'tensor'))
        >>> p.shape, p.size
        ((2, 2), 4)
        >>> p.along("data", 1)
        sbp.placement('cpu', ranks=[2, 3], axis_names=('tensor',))
    """

    type: str
    ranks: Ranks
    axis_names: tuple[str, ...]

    def __init__(
        self, type: str, ranks: Any, axis_names: Sequence[str] | None = None
    ) -> None:
        platform = _check_type(type)
        grid = _check_ranks(type, ranks)
        names = _check_names(axis_names, grid)
        _check_range(platform, grid)
        # A frozen dataclass has no other way to set its own fields.
        object.__setattr__(self, "type", platform)
        object.__setattr__(self, "ranks", _nested(grid.tolist()))
        object.__setattr__(self, "axis_names", names)

    @classmethod
    def all(
        cls,
        type: str,
        shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> "Placement":
        """Returns the placement of all devices of a type, in rank order.

        Args:
            type: Device type, as for ``sbp.placement``.
            shape: Sizes of the axes; their product is the number of devices. None
                is one axis.
            axis_names: One name per axis, or None for the default names.

        Raises:
            ValueError: If there is no such device, or ``shape`` does not use them
                all.

        Example:
            >>> import sbp
            >>> sbp.placement.all("cpu", (2, 4)).ranks
            ((0, 1, 2, 3), (4, 5, 6, 7))
        """
        num_devices = len(_devices(_check_type(type)))
        sizes = (num_devices,) if shape is None else tuple(shape)
        if math.prod(sizes) != num_devices:
            raise ValueError(
                f"sbp.placement.all({type!r}, shape={sizes}) needs {math.prod(sizes)} "
                f"devices, but there are {num_devices}. Use sizes whose product is "
                f"{num_devices}, or name the ranks: sbp.placement({type!r}, ranks)."
            )
        ranks = np.arange(num_devices).reshape(sizes)
        return cls(type, ranks.tolist(), axis_names)

    @classmethod
    def from_mesh(cls, mesh: Mesh) -> "Placement":
        """Returns the placement over the devices of a JAX mesh, in its order.

        Raises:
            ValueError: If the mesh holds devices that this job does not have.
        """
        return _from_mesh(mesh)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return np.shape(self.ranks)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def flat_ranks(self) -> tuple[int, ...]:
        """Ranks in row-major order."""
        return tuple(np.ravel(self.ranks).tolist())

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each axis, by name."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    @property
    def devices(self) -> np.ndarray:
        """The devices, in an object array of the placement's shape."""
        return self.mesh.devices

    @property
    def mesh(self) -> Mesh:
        """The mesh over these devices whose axes are all Explicit."""
        return self.mesh_with(AxisType.Explicit)

    def mesh_with(self, axis_type: AxisType) -> Mesh:
        """Returns the mesh over these devices with all axes of ``axis_type``."""
        return _mesh(self, axis_type)

    def along(self, axis: str, index: int) -> "Placement":
        """Returns the placement of the devices at ``index`` of ``axis``.

        The axis itself is gone from it, unless it is the only one. This is how the
        devices of a pipeline stage are named: ``placement.along("stage", 1)``.

        Args:
            axis: Name of the axis to cut.
            index: Position along it; a negative one counts from the end.

        Raises:
            ValueError: If there is no such axis or position.
        """
        if axis not in self.axis_names:
            raise ValueError(
                f"There is no axis {axis!r} in a placement with axes {self.axis_names}."
                f"{did_you_mean(axis, self.axis_names) or ' Use one of these.'}"
            )
        dim = self.axis_names.index(axis)
        size = self.shape[dim]
        if not -size <= index < size:
            raise ValueError(
                f"Position {index} is outside of axis {axis!r}, which has {size} "
                f"devices. Use an index from 0 to {size - 1}."
            )
        ranks = np.array(self.ranks).take(index, axis=dim)
        if ranks.ndim == 0:
            return Placement(self.type, (int(ranks),), self.axis_names)
        names = tuple(name for name in self.axis_names if name != axis)
        return Placement(self.type, ranks.tolist(), names)

    def __repr__(self) -> str:
        ranks = np.array(self.ranks).tolist()
        return (
            f"sbp.placement({self.type!r}, ranks={ranks}, axis_names={self.axis_names})"
        )


placement = Placement


@functools.lru_cache(maxsize=256)
def _mesh(placement: Placement, axis_type: AxisType) -> Mesh:
    devices = np.array(_devices(placement.type), dtype=object)
    return Mesh(
        devices[np.array(placement.ranks)],
        placement.axis_names,
        axis_types=(axis_type,) * len(placement.axis_names),
    )


@functools.lru_cache(maxsize=256)
def _from_mesh(mesh: Mesh) -> Placement:
    platform = _PLATFORMS[mesh.devices.flat[0].platform]
    rank_of = {device: rank for rank, device in enumerate(_devices(platform))}
    missing = [device for device in mesh.devices.flat if device not in rank_of]
    if missing:
        raise ValueError(
            f"The mesh holds {missing[0]}, which is not among the {len(rank_of)} "
            f"{platform} devices of this job, so that it has no rank."
        )
    ranks = np.array([rank_of[d] for d in mesh.devices.flat]).reshape(
        mesh.devices.shape
    )
    return Placement(platform, ranks.tolist(), tuple(mesh.axis_names))


def _devices(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(
            f"There is no {platform} device: JAX found only "
            f"{jax.default_backend()} devices. Use sbp.placement("
            f"{jax.default_backend()!r}, ...), or install JAX for {platform}."
        ) from error


def _check_type(device_type: object) -> str:
    if device_type not in _PLATFORMS:
        raise ValueError(
            f"sbp.placement got device type {device_type!r}, but the types are "
            f"{', '.join(map(repr, _PLATFORMS))}."
        )
    return _PLATFORMS[str(device_type)]


def _check_ranks(device_type: str, ranks: object) -> np.ndarray:
    asked = f"sbp.placement({device_type!r}, ranks={_plain(ranks)!r})"
    try:
        array = np.atleast_1d(np.asarray(ranks))
    except ValueError as error:
        raise ValueError(
            f"{asked}: the rows have different lengths, but ranks fill a grid. "
            "Give as many ranks in every row."
        ) from error
    if array.size == 0:
        raise ValueError(f"{asked} names no rank. Name at least one, as in ranks=[0].")
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{asked}: ranks are whole numbers, but these have type {array.dtype}."
        )
    values, counts = np.unique(array, return_counts=True)
    if counts.max() > 1:
        raise ValueError(
            f"{asked} names rank {values[counts > 1][0]} more than once, but a device "
            "has one position in a placement. Name each rank once."
        )
    if values[0] < 0:
        raise ValueError(f"{asked} names rank {values[0]}, but ranks count from 0.")
    return array


def _check_names(names: Sequence[str] | None, ranks: np.ndarray) -> tuple[str, ...]:
    if names is None:
        if ranks.ndim <= len(_DEFAULT_NAMES):
            return _DEFAULT_NAMES[: ranks.ndim]
        return tuple(f"axis_{i}" for i in range(ranks.ndim))
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(names) != ranks.ndim:
        raise ValueError(
            f"axis_names={names} has {len(names)} names, but ranks of shape "
            f"{ranks.shape} have {ranks.ndim} axes. Give one name per axis."
        )
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(f"axis_names={names}: {name!r} is not a name.")
    if len(set(names)) < len(names):
        raise ValueError(f"axis_names={names} repeats a name. Use different names.")
    return names


def _check_range(platform: str, ranks: np.ndarray) -> None:
    num_devices = len(_devices(platform))
    largest = int(ranks.max())
    if largest < num_devices:
        return
    more = (
        f"jax.config.update('jax_num_cpu_devices', {largest + 1}) before JAX is first "
        "used gives that many in one process; `python -m launch.run --nproc "
        f"{largest + 1}` gives one per process"
        if platform == "cpu"
        else f"`python -m launch.run` on more machines gives more than {num_devices}"
    )
    raise ValueError(
        f"sbp.placement({platform!r}, ranks={ranks.tolist()}) names rank {largest}, "
        f"but there are {num_devices} {platform} devices, ranks 0 to "
        f"{num_devices - 1}. Use smaller ranks, or start with more devices: {more}."
    )


def _nested(ranks: list | int) -> Any:
    return tuple(map(_nested, ranks)) if isinstance(ranks, list) else ranks


def _plain(ranks: object) -> object:
    return ranks.tolist() if isinstance(ranks, np.ndarray) else ranks
