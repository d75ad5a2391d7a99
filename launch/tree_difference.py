"""Says in words how the arrays of a checkpoint differ from those a run needs."""

import re
from typing import Any

import jax

MAX_LINES = 16  # so that a message fits a screen


def paths(tree: Any) -> list[str]:
    """Returns the paths of the leaves.

    Example:
        >>> paths({"blocks": [{"bias": 0}, {"bias": 0}]})
        ['blocks/0/bias', 'blocks/1/bias']
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves
    ]


def describe(saved: Any, wanted: Any) -> list[str]:
    """Returns a line for each path whose arrays differ in presence, shape or dtype.

    The layers of a stack share a line, and parameters come first. None at all means
    that the trees fit.

    Args:
        saved: Tree of leaves with ``shape`` and ``dtype``.
        wanted: Tree of leaves with ``shape`` and ``dtype``.

    Example:
        >>> saved = {"w": jax.ShapeDtypeStruct((2, 3), "float32")}
        >>> wanted = {"w": jax.ShapeDtypeStruct((2, 4), "float32")}
        >>> describe(saved, wanted)
        ['  w: float32[2,3] in the checkpoint, float32[2,4] in this run.']
    """
    types = _types(saved), _types(wanted)
    counts: dict[str, int] = {}
    found = types[0] | types[1]
    for path in sorted(found, key=lambda path: not path.startswith("params/")):
        text = _difference(types[0].get(path), types[1].get(path))
        line = f"  {re.sub(r'(?<=/)[0-9]+(?=/)', '*', path)}: {text}"
        if text:
            counts[line] = counts.get(line, 0) + 1
    lines = [
        f"{line}." if count == 1 else f"{line} ({count} arrays)."
        for line, count in counts.items()
    ]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"  ... and {len(lines) - MAX_LINES} more."]
    return lines


def _types(tree: Any) -> dict[str, str]:
    """Returns path -> type, such as ``float32[128,512]``."""
    leaves = zip(paths(tree), jax.tree.leaves(tree), strict=True)
    return {
        path: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for path, leaf in leaves
    }


def _difference(saved: str | None, wanted: str | None) -> str:
    if saved == wanted:
        return ""
    if wanted is None:
        return f"{saved} in the checkpoint, not in this run"
    if saved is None:
        return f"{wanted} in this run, not in the checkpoint"
    return f"{saved} in the checkpoint, {wanted} in this run"
