"""Stage assignment: which stage holds which layers of a stack.

Layers stay in order. With several chunks per stage the stack is cut into
``num_stages * num_chunks`` pieces, and piece ``p`` is chunk ``p // num_stages`` of
stage ``p % num_stages``; with one chunk, pieces and stages are the same.

========================  ==========================================================
`assign_balanced`         as even as the layers allow, the default; embedding and head
                          may be given a weight
`assign_layers`           the number of layers of each stage, as the user lists them
`from_stage_ids`          one stage per layer, as the user lists them
`assign_libai`            the split that LiBai uses
========================  ==========================================================
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import numpy as np


class AbstractPlacement(Protocol):
    """Anything that can be cut along a named axis, such as `sbp.placement`."""

    def along(self, axis: str, index: int) -> Self:
        """Returns the part at ``index`` of ``axis``."""
        ...


SomePlacement = TypeVar("SomePlacement", bound=AbstractPlacement)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Consecutive layers for each piece of the model.

    Attributes:
        layers_per_piece: Number of layers of each piece, from input to output.
        num_stages: Stages of the pipeline.

    Raises:
        ValueError: If the pieces do not fill every chunk of every stage, or one is
            empty.

    Example:
        >>> assignment = assign_balanced(num_layers=5, num_stages=2)
        >>> assignment.layers_per_piece
        (2, 3)
        >>> assignment.stage_of(1), assignment.stage_of(-1)
        (0, 1)
        >>> assignment.layers_of(stage=1)
        range(2, 5)
    """

    layers_per_piece: tuple[int, ...]
    num_stages: int

    def __post_init__(self) -> None:
        pieces = self.layers_per_piece
        if self.num_stages < 1 or not pieces or len(pieces) % self.num_stages:
            raise ValueError(
                f"layers_per_piece={pieces} has {len(pieces)} pieces, but every one of "
                f"the num_stages={self.num_stages} stages holds the same positive "
                "number of them. List one piece per stage, or per chunk of a stage."
            )
        if min(pieces) < 1:
            raise ValueError(
                f"layers_per_piece={pieces} leaves piece {pieces.index(min(pieces))} "
                f"with {min(pieces)} layers, but every piece holds at least one. Move "
                "a layer there, or use fewer stages or chunks."
            )

    @property
    def num_layers(self) -> int:
        """Layers of the whole stack."""
        return sum(self.layers_per_piece)

    @property
    def num_chunks(self) -> int:
        """Pieces per stage."""
        return len(self.layers_per_piece) // self.num_stages

    @property
    def max_layers_per_piece(self) -> int:
        """Layers of the largest piece: what each piece's stacked weights hold."""
        return max(self.layers_per_piece)

    @property
    def is_uniform(self) -> bool:
        """True if all pieces hold the same number of layers."""
        return min(self.layers_per_piece) == self.max_layers_per_piece

    @property
    def layer_indices(self) -> np.ndarray:
        """Layers in the order of their stacked weights, -1 where a piece has fewer.

        int32 of shape ``(num_stages, num_chunks, max_layers_per_piece)``.

        Example:
            >>> assign_layers((1, 2), num_layers=3, num_stages=2).layer_indices[:, 0]
            array([[ 0, -1],
                   [ 1,  2]], dtype=int32)
        """
        shape = (self.num_stages, self.num_chunks, self.max_layers_per_piece)
        indices = np.full(shape, -1, np.int32)
        for stage, chunk in np.ndindex(shape[:2]):
            layers = self.layers_of(stage, chunk)
            indices[stage, chunk, : len(layers)] = layers
        return indices

    def layers_of(self, stage: int, chunk: int = 0) -> range:
        """Returns the layers of one piece.

        Raises:
            ValueError: If there is no such stage or chunk.
        """
        if not (0 <= stage < self.num_stages and 0 <= chunk < self.num_chunks):
            raise ValueError(
                f"There is no chunk {chunk} of stage {stage}: the stages are 0 to "
                f"{self.num_stages - 1}, their chunks 0 to {self.num_chunks - 1}. Use "
                "an index in these ranges."
            )
        piece = chunk * self.num_stages + stage
        first = sum(self.layers_per_piece[:piece])
        return range(first, first + self.layers_per_piece[piece])

    def stage_of(self, layer_index: int) -> int:
        """Returns the stage that holds a layer.

        Args:
            layer_index: Position in the stack; a negative one counts from the end, so
                that -1 is the last layer.

        Raises:
            ValueError: If there is no such layer.
        """
        return self._piece_of(layer_index) % self.num_stages

    def chunk_of(self, layer_index: int) -> int:
        """Returns the chunk of its stage that holds a layer; see `stage_of`."""
        return self._piece_of(layer_index) // self.num_stages

    def _piece_of(self, layer_index: int) -> int:
        if not -self.num_layers <= layer_index < self.num_layers:
            raise ValueError(
                f"There is no layer {layer_index} in a stack of {self.num_layers}. Use "
                f"an index from {-self.num_layers} to {self.num_layers - 1}."
            )
        ends = itertools.accumulate(self.layers_per_piece)
        position = layer_index % self.num_layers
        return next(piece for piece, end in enumerate(ends) if position < end)

    def placement_of_layer(
        self, placement: SomePlacement, layer_index: int
    ) -> SomePlacement:
        """Returns the devices that hold a layer: its stage's part of ``placement``.

        Args:
            placement: Placement of the whole model, with an axis 'stage'.
            layer_index: Position in the stack; a negative one counts from the end.

        Raises:
            ValueError: If there is no such layer, or no axis 'stage'.

        Example:
            >>> import sbp
            >>> whole = sbp.placement("cpu", [[0, 1], [2, 3]], ("stage", "tensor"))
            >>> assign_balanced(4, 2).placement_of_layer(whole, -1)
            sbp.placement('cpu', ranks=[2, 3], axis_names=('tensor',))
        """
        return placement.along("stage", self.stage_of(layer_index))


def assign_balanced(
    num_layers: int,
    num_stages: int,
    *,
    num_chunks: int = 1,
    embedding_cost: float = 0.0,
    head_cost: float = 0.0,
) -> StageAssignment:
    """Cuts a stack so that the slowest piece is as fast as possible.

    Each layer goes to the piece that costs least so far. Among equals the last one
    takes it, since the stages in front keep more activations alive.

    Args:
        num_layers: Layers of the stack.
        num_stages: Stages of the pipeline.
        num_chunks: Pieces per stage.
        embedding_cost: Time of the embedding on the first piece, in layers. 0, the
            default, is right if all stages share it.
        head_cost: Time of head and loss on the last piece, in layers; see the function
            `head_cost`. 0, the default, is right if all stages share them.

    Raises:
        ValueError: If a size is less than 1, a cost negative, or there are fewer
            layers than pieces.

    Example:
        >>> assign_balanced(24, 5).layers_per_piece
        (4, 5, 5, 5, 5)
        >>> assign_balanced(24, 4, embedding_cost=0.5, head_cost=3).layers_per_piece
        (6, 7, 7, 4)
    """
    _check_sizes(num_layers, num_stages, num_chunks)
    if embedding_cost < 0 or head_cost < 0:
        raise ValueError(
            f"embedding_cost={embedding_cost} and head_cost={head_cost} are times in "
            "layers, and a time is not negative. Use 0 to leave one out."
        )
    num_pieces = num_stages * num_chunks
    costs = [1.0] * num_pieces
    costs[0] += embedding_cost
    costs[-1] += head_cost
    counts = [1] * num_pieces
    for _ in range(num_layers - num_pieces):
        cheapest = min(range(num_pieces), key=lambda piece: (costs[piece], -piece))
        costs[cheapest] += 1
        counts[cheapest] += 1
    return StageAssignment(layers_per_piece=tuple(counts), num_stages=num_stages)


def assign_layers(
    layers_per_piece: Sequence[int],
    *,
    num_layers: int,
    num_stages: int,
    num_chunks: int = 1,
) -> StageAssignment:
    """Takes the number of layers of each piece as given.

    Args:
        layers_per_piece: One positive number per stage, or per piece if there are
            several chunks, from input to output.
        num_layers: Layers of the stack, which the numbers must add up to.
        num_stages: Stages of the pipeline.
        num_chunks: Pieces per stage.

    Raises:
        ValueError: If the list is too short or too long, does not add up, or leaves a
            piece empty.

    Example:
        >>> assign_layers((6, 7, 7, 4), num_layers=24, num_stages=4).stage_of(6)
        1
    """
    _check_sizes(num_layers, num_stages, num_chunks)
    num_pieces, counts = num_stages * num_chunks, tuple(layers_per_piece)
    if len(counts) != num_pieces:
        raise ValueError(
            f"pipeline_stage_layers={counts} lists {len(counts)} numbers, but there "
            f"are {num_pieces} pieces: {num_stages} stages x {num_chunks} chunks. List "
            "one number for each."
        )
    if sum(counts) != num_layers:
        raise ValueError(
            f"pipeline_stage_layers={counts} adds up to {sum(counts)} layers, but the "
            f"model has {num_layers}. {_difference(sum(counts), num_layers)}."
        )
    return StageAssignment(layers_per_piece=counts, num_stages=num_stages)


def from_stage_ids(
    stage_ids: Sequence[int], *, num_layers: int, num_stages: int
) -> StageAssignment:
    """Takes the stage of each layer as given; one chunk per stage.

    Args:
        stage_ids: ``stage_ids[i]`` is the stage of layer ``i``.
        num_layers: Layers of the stack.
        num_stages: Stages of the pipeline.

    Raises:
        ValueError: If the list has a wrong length, names a stage that does not exist,
            leaves one out, or goes back to an earlier one.

    Example:
        >>> from_stage_ids([0, 0, 1], num_layers=3, num_stages=2).layers_per_piece
        (2, 1)
    """
    _check_sizes(num_layers, num_stages, num_chunks=1)
    ids = list(stage_ids)
    if len(ids) != num_layers:
        raise ValueError(
            f"The list of stages {ids} has {len(ids)} entries, but the model has "
            f"{num_layers} layers. List one stage per layer."
        )
    if sorted(set(ids)) != list(range(num_stages)):
        raise ValueError(
            f"The list of stages {ids} names the stages {sorted(set(ids))}, but with "
            f"num_stages={num_stages} each of 0 to {num_stages - 1} needs a layer. "
            "Name exactly these."
        )
    if ids != sorted(ids):
        layer = next(i for i, (a, b) in enumerate(itertools.pairwise(ids)) if a > b)
        raise ValueError(
            f"The list of stages {ids} goes back from stage {ids[layer]} to stage "
            f"{ids[layer + 1]} at layer {layer + 1}, but a microbatch passes the "
            "stages in order. Sort the list."
        )
    counts = tuple(ids.count(stage) for stage in range(num_stages))
    return StageAssignment(layers_per_piece=counts, num_stages=num_stages)


def assign_libai(num_layers: int, num_stages: int) -> StageAssignment:
    """Cuts a stack as LiBai does, to repeat its runs.

    A remainder goes to the last stages. If four stages or more divide eight layers or
    more, the quotas are raised so that the last stage, which has the head, gets less.
    The layers are dealt into the quotas in order.

    Raises:
        ValueError: If a size is less than 1, or there are fewer layers than stages.

    Example:
        >>> assign_libai(24, 4).layers_per_piece
        (6, 7, 7, 4)
    """
    _check_sizes(num_layers, num_stages, num_chunks=1)
    nominal = num_layers
    if num_stages >= 4 and num_layers >= 8 and num_layers % num_stages == 0:
        nominal += min(num_stages - 1, num_layers // num_stages)
    quota, remainder = divmod(nominal, num_stages)
    quotas = [quota + (stage >= num_stages - remainder) for stage in range(num_stages)]
    left, counts = num_layers, []
    for quota in quotas:
        counts.append(min(quota, left))
        left -= counts[-1]
    return StageAssignment(layers_per_piece=tuple(counts), num_stages=num_stages)


def head_cost(*, vocab_size: int, model_dim: int, mlp_dim: int) -> float:
    """Returns the time of a vocabulary head in layers, for `assign_balanced`.

    Counts multiplications with weights: ``vocab_size * model_dim`` per token, against
    ``4 * model_dim**2 + 2 * model_dim * mlp_dim`` in a transformer layer.

    Example:
        >>> head_cost(vocab_size=49_152, model_dim=1024, mlp_dim=4096)
        4.0
    """
    return vocab_size / (4 * model_dim + 2 * mlp_dim)


def _check_sizes(num_layers: int, num_stages: int, num_chunks: int) -> None:
    sizes = {
        "num_layers": num_layers,
        "num_stages": num_stages,
        "num_chunks": num_chunks,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} is less than 1. Give a positive integer.")
    num_pieces = num_stages * num_chunks
    if num_layers < num_pieces:
        raise ValueError(
            f"num_layers={num_layers} is fewer than the {num_pieces} pieces of "
            f"{num_stages} stages x {num_chunks} chunks, and every piece holds at "
            f"least one layer. Use at most {num_layers} pieces, or more layers."
        )


def _difference(given: int, wanted: int) -> str:
    if given < wanted:
        return f"Add {wanted - given} more"
    return f"Take {given - wanted} away"
