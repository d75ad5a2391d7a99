"""Which parameters are matrices, for update rules that treat matrices as such.

A parameter of a linear map may have several dims for its inputs and several for its
outputs, and may hold several matrices in one array. The layers of a stack are matrices
of their own in any case.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from models.sharding import is_match
from models.stacked import path_of


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """How the dims of an array make matrices; each index of the others has its own.

    Attributes:
        rows: Dims of the inputs.
        columns: Dims of the outputs.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]


# Path of a parameter -> dims of one block's. What has two dims is a matrix in any case.
MATRICES: Mapping[str, Matrix] = {
    "blocks/*/attention/qkv/kernel": Matrix((0,), (2, 3)),  # (D, 3, H, K): three
    "blocks/*/attention/out/kernel": Matrix((0, 1), (2,)),  # (H, K, D)
    "patches/kernel": Matrix((0, 1, 2), (3,)),  # (height, width, channels, D)
}


def matrix_of(path: str, num_dims: int) -> Matrix | None:
    """Returns how a parameter is a matrix; None if it is none.

    Args:
        path: As in a sharding table.
        num_dims: Of the array, that of the layers in a stack included.

    Example:
        >>> matrix_of("blocks/*/mlp/up/kernel", 3)
        Matrix(rows=(1,), columns=(2,))
        >>> matrix_of("blocks/*/attention/qkv/bias", 4), matrix_of("final_norm/bias", 1)
        (None, None)
    """
    num_before = int(path.startswith("blocks/"))
    named = (matrix for row, matrix in MATRICES.items() if is_match(row, path))
    found = next(named, None)
    if found is None and num_dims - num_before == 2:
        found = Matrix((0,), (1,))
    if found is None:
        return None
    return Matrix(
        tuple(dim + num_before for dim in found.rows),
        tuple(dim + num_before for dim in found.columns),
    )


def map_matrices(run: Any, tree: Any, *rest: Any) -> Any:
    """Returns the results of ``run(matrix, leaf, *leaves)``, in the form of the tree.

    Args:
        run: Its first argument is a `Matrix`, or None.
        tree: Arrays by the paths of the parameters.
        *rest: Trees of the same form.
    """

    def apply(path: tuple, leaf: Any, *others: Any) -> Any:
        return run(matrix_of(path_of(path), leaf.ndim), leaf, *others)

    return jax.tree.map_with_path(apply, tree, *rest)
