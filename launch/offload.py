"""Optimizer state in the memory of the host, which is larger (arXiv:2101.06840).

It is brought to the device for the update, and back: twice its bytes cross the bus in
a step.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

HOST = "pinned_host"


def on_host(shapes: Any, shardings: Any) -> Any:
    """Returns the shardings of a state whose arrays are on the host.

    Scalars stay where they are.

    Args:
        shapes: Of the state.
        shardings: Of the state on the devices.
    """

    def move(leaf: Any, sharding: NamedSharding) -> NamedSharding:
        return sharding.with_memory_kind(HOST) if leaf.ndim else sharding

    return jax.tree.map(move, shapes, shardings)


def around(update: Callable[..., tuple]) -> Callable[..., tuple]:
    """Returns a function of a train state that has its optimizer state on the host.

    Args:
        update: Of a train state on the devices, and of anything else; returns one, and
            something more.
    """

    def run(state: Any, *rest: Any) -> tuple:
        fetched = _move(state.opt_state, jax.memory.Space.Device)
        new, *others = update(dataclasses.replace(state, opt_state=fetched), *rest)
        stored = _move(new.opt_state, jax.memory.Space.Host)
        return dataclasses.replace(new, opt_state=stored), *others

    return run


def problems(mesh: Mesh) -> Iterator[str]:
    """Yields a sentence if the devices cannot read memory of their hosts."""
    device = mesh.devices.flat[0]
    try:
        kinds = [memory.kind for memory in device.addressable_memories()]
    except jax.errors.JaxRuntimeError:  # a GPU that is not there does not know
        return
    yield from missing(kinds, device.platform)


def missing(kinds: Sequence[str], platform: str) -> Iterator[str]:
    """Yields a sentence if there is no memory of the host among those of a platform.

    Example:
        >>> list(missing(["device", "pinned_host"], "gpu"))
        []
    """
    if HOST not in kinds:
        found = ", ".join(map(repr, kinds))
        yield (
            f"optim.offload=True needs memory of the kind {HOST!r}, but devices of"
            f" platform {platform!r} have {found}. Set optim.offload=False;"
            " optim.state_dtype='bfloat16' or zero.stage=1 make the state smaller too."
        )


def _move(tree: Any, space: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, tree)
