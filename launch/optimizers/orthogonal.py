"""What Muon (Jordan et al., 2024) treats as matrices, for Optax's implementation."""

import math
from typing import Any

import optax

from launch.optimizers.matrices import Matrix, map_matrices, matrix_of


def is_for_muon(path: str) -> bool:
    """Whether a parameter is a kernel of a block, and known to be a matrix.

    Args:
        path: As in a sharding table.

    Example:
        >>> [is_for_muon(f"blocks/*/mlp/up/{name}") for name in ("kernel", "bias")]
        [True, False]
        >>> is_for_muon("token/embedding")
        False
    """
    is_kernel = path.startswith("blocks/") and path.endswith("/kernel")
    # Three dims: one matrix for each layer.
    return is_kernel and matrix_of(path, 3) is not None


def muon_dims(tree: Any) -> Any:
    """Returns which dims Optax shall take as rows and columns; all are matrices."""

    def describe(matrix: Matrix, _: Any) -> optax.contrib.MuonDimensionNumbers:
        return optax.contrib.MuonDimensionNumbers(
            reduction_axis=matrix.rows, output_axis=matrix.columns
        )

    return map_matrices(describe, tree)


def match_adam_rms() -> optax.GradientTransformation:
    """Multiplies orthogonal matrices by ``0.2 * sqrt(max(rows, columns))``."""

    def scale(matrix: Matrix, update: Any) -> Any:
        sizes = (
            math.prod(update.shape[dim] for dim in dims)
            for dims in (matrix.rows, matrix.columns)
        )
        return update * (0.2 * math.sqrt(max(sizes)))

    return optax.stateless(lambda updates, _: map_matrices(scale, updates))
