"""Bytes that collectives move. Pure arithmetic, and the one cost model of ``sbp``.

What is counted is what the busiest device receives, for ring algorithms. Planning,
``sbp.plan`` and ``sbp.explain`` all read these numbers.
"""

import math
from collections.abc import Sequence


def all_gather_bytes(local_bytes: int, num_devices: int) -> int:
    """Returns the bytes received by each device that gathers all pieces.

    Args:
        local_bytes: Size of the piece that a device starts with.
        num_devices: Devices that gather together.

    Example:
        >>> all_gather_bytes(128, 4)
        384
    """
    return local_bytes * (num_devices - 1)


def reduce_scatter_bytes(local_bytes: int, num_devices: int) -> int:
    """Returns the bytes received by each device that sums and keeps one part.

    Args:
        local_bytes: Size of the addend that a device starts with.
        num_devices: Devices that reduce together.

    Example:
        >>> reduce_scatter_bytes(512, 4)
        384
    """
    return local_bytes * (num_devices - 1) // num_devices


def all_reduce_bytes(local_bytes: int, num_devices: int) -> int:
    """Returns the bytes received by each device that sums and keeps everything.

    Example:
        >>> all_reduce_bytes(512, 4)
        768
    """
    return 2 * local_bytes * (num_devices - 1) // num_devices


def all_to_all_bytes(local_bytes: int, num_devices: int) -> int:
    """Returns the bytes received by each device that swaps parts with the others.

    Example:
        >>> all_to_all_bytes(512, 4)
        384
    """
    return local_bytes * (num_devices - 1) // num_devices


def permute_bytes(piece_bytes: int, num_rounds: int) -> int:
    """Returns the bytes received in rounds of collective permutes of one piece.

    Example:
        >>> permute_bytes(64, 3)
        192
    """
    return piece_bytes * num_rounds


def size_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of a dense array.

    Example:
        >>> size_bytes((8, 16), 4)
        512
    """
    return math.prod(shape) * itemsize
