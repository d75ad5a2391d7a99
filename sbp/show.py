"""Shows which device holds which part of a global tensor, as text and as a drawing."""

import dataclasses
import html
import itertools

import jax
import numpy as np

from sbp.global_tensor import placement_of, signature_of
from sbp.placement import Placement
from sbp.reshard import axes_of
from sbp.signature import Signature, short
from sbp.tiling import block_indices, from_signature, labels

_CELL_WIDTH, _CELL_HEIGHT, _MARGIN = 110, 44, 64  # of the drawing, in pixels


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds.

    Attributes:
        rank: The rank.
        block: Which block of each dim it holds, counted from 0.
        start: First index of it in each dim.
        shape: Its local shape.
        addend: Number of the addend, 0 where there is no partial sum.
    """

    rank: int
    block: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    addend: int

    @property
    def slices(self) -> str:
        """Its place in the whole tensor, as Python slices it."""
        ends = zip(self.start, self.shape, strict=True)
        return "[" + ", ".join(f"{start}:{start + n}" for start, n in ends) + "]"


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A global tensor's parts; prints as text, and draws itself in a notebook.

    Attributes:
        title: Its type, as JAX prints it.
        placement: Where it is.
        signature: How it lies.
        parts: What each rank holds, in the order of the placement.
    """

    title: str
    placement: Placement
    signature: Signature
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        grid = [self._grid()] if self._drawn_dims else []
        return "\n\n".join([self._head, *grid, self._table()])

    __repr__ = __str__

    @property
    def _head(self) -> str:
        ranks = np.array(self.placement.ranks).tolist()
        return f"{self.title}: {short(self.signature)} on {self.placement.type} {ranks}"

    @property
    def _drawn_dims(self) -> list[int]:
        """Both dims of a matrix, else those that are cut, or the first."""
        ndim = len(self.parts[0].block)
        if ndim == 2:
            return [0, 1]
        cut = [dim for dim in range(ndim) if any(p.block[dim] for p in self.parts)]
        return cut or [0][:ndim]

    def _cells(self) -> tuple[list[str], list[str], dict[tuple[int, int], str]]:
        """Returns labels of the rows and columns of the drawing, and its cells.

        Rows are the first dim that is drawn; columns all others together.
        """
        rows_dim, *column_dims = self._drawn_dims
        rows: dict[int, str] = {}
        columns: dict[tuple[int, ...], str] = {}
        holders: dict[tuple[int, tuple[int, ...]], dict[int, list[int]]] = {}
        for part in sorted(self.parts, key=lambda part: part.block):
            column = tuple(part.block[dim] for dim in column_dims)
            rows[part.block[rows_dim]] = _range(part, [rows_dim])
            columns[column] = _range(part, column_dims)
            cell = holders.setdefault((part.block[rows_dim], column), {})
            cell.setdefault(part.addend, []).append(part.rank)
        order = {column: i for i, column in enumerate(columns)}
        cells = {
            (row, order[column]): _cell(cell) for (row, column), cell in holders.items()
        }
        return list(rows.values()), list(columns.values()), cells

    def _grid(self) -> str:
        rows, columns, cells = self._cells()
        texts = [cells[i, j] for i in range(len(rows)) for j in range(len(columns))]
        width = max(map(len, [*texts, *columns]))
        side = max(map(len, rows))
        rule = " " * side + " +" + ("-" * (width + 2) + "+") * len(columns)
        lines = []
        if any(columns):
            names = "".join(f" {name:^{width + 2}}" for name in columns)
            lines.append(f"{'':{side}} {names}".rstrip())
        lines.append(rule)
        for i, row in enumerate(rows):
            held = "".join(f" {cells[i, j]:^{width}} |" for j in range(len(columns)))
            lines += [f"{row:>{side}} |{held}", rule]
        return "\n".join(lines)

    def _table(self) -> str:
        parts = [f"part {part.slices}" for part in self.parts]
        width = max(map(len, parts))
        lines = [
            f"rank {part.rank:>3}  {text:<{width}}  local shape {part.shape}"
            for part, text in zip(self.parts, parts, strict=True)
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title = html.escape(self._head)
        rows = "".join(
            f"<tr><td>{part.rank}</td><td>{part.slices}</td><td>{part.shape}</td></tr>"
            for part in self.parts
        )
        return (
            f"<p><code>{title}</code></p>{self._svg() if self._drawn_dims else ''}"
            "<table><tr><th>rank</th><th>part</th><th>local shape</th></tr>"
            f"{rows}</table>"
        )

    def _svg(self) -> str:
        rows, columns, cells = self._cells()
        boxes = [
            _box(_CELL_WIDTH * j + _MARGIN, _CELL_HEIGHT * i + _MARGIN / 2, text)
            for (i, j), text in sorted(cells.items())
        ]
        names = [
            _text(_CELL_WIDTH * (j + 0.5) + _MARGIN, _MARGIN / 4, name)
            for j, name in enumerate(columns)
        ] + [
            _text(_MARGIN / 2, _CELL_HEIGHT * (i + 0.5) + _MARGIN / 2, name)
            for i, name in enumerate(rows)
        ]
        width = _CELL_WIDTH * len(columns) + _MARGIN + 1
        height = _CELL_HEIGHT * len(rows) + _MARGIN / 2 + 1
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
            f'height="{height}" font-family="monospace" font-size="12">'
            f"{''.join(boxes + names)}</svg>"
        )


def show(x: jax.Array) -> Picture:
    """Returns a picture of which rank holds which part of a global tensor.

    In a notebook it draws itself; elsewhere print it. In the drawing each box is a
    part: ``0, 1`` are ranks that hold the same values, ``0 + 1`` ranks that hold
    addends of them.

    Args:
        x: A global tensor, outside of ``jit``.

    Raises:
        TypeError: If ``x`` is on no mesh, or traced.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [[0, 1], [2, 3]])
        >>> x = sbp.zeros((16, 8), placement=p, sbp=sbp.parse("S(0),S(1)"))
        >>> print(show(x))
        float32[16@x,8@y]: (S(0), S(1)) on cpu [[0, 1], [2, 3]]
        <BLANKLINE>
               0:4   4:8
             +-----+-----+
         0:8 |  0  |  1  |
             +-----+-----+
        8:16 |  2  |  3  |
             +-----+-----+
        <BLANKLINE>
        rank   0  part [0:8, 0:4]   local shape (8, 4)
        rank   1  part [0:8, 4:8]   local shape (8, 4)
        rank   2  part [8:16, 0:4]  local shape (8, 4)
        rank   3  part [8:16, 4:8]  local shape (8, 4)
    """
    placement, signature = placement_of(x), signature_of(x)
    axes = axes_of(placement.mesh)
    tiling = from_signature(signature, placement.axis_names, x.ndim)
    local_shape = tiling.local_shape(x.shape, dict(axes))
    blocks = block_indices(tiling, axes).tolist()
    addends = labels(tiling.partial, axes).tolist()
    parts = tuple(
        Part(
            rank=rank,
            block=tuple(block),
            start=tuple(i * n for i, n in zip(block, local_shape, strict=True)),
            shape=local_shape,
            addend=addend,
        )
        for rank, block, addend in zip(
            placement.flat_ranks, blocks, addends, strict=True
        )
    )
    return Picture(str(jax.typeof(x)), placement, signature, parts)


def _range(part: Part, dims: list[int]) -> str:
    ends = ((part.start[dim], part.start[dim] + part.shape[dim]) for dim in dims)
    return ", ".join(f"{start}:{stop}" for start, stop in ends)


def _cell(ranks_by_addend: dict[int, list[int]]) -> str:
    groups = [", ".join(map(str, ranks)) for ranks in ranks_by_addend.values()]
    if len(groups) > 1:
        groups = [f"({group})" if "," in group else group for group in groups]
    return " + ".join(groups)


def _box(x: float, y: float, text: str) -> str:
    first = int("".join(itertools.takewhile(str.isdigit, text.lstrip("("))))
    fill = f"hsl({first * 67 % 360}, 60%, 85%)"
    middle = _text(x + _CELL_WIDTH / 2, y + _CELL_HEIGHT / 2, text)
    return (
        f'<rect x="{x}" y="{y}" width="{_CELL_WIDTH}" height="{_CELL_HEIGHT}" '
        f'fill="{fill}" stroke="#444"/>{middle}'
    )


def _text(x: float, y: float, text: str) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="middle" dominant-baseline="middle">'
        f"{html.escape(text)}</text>"
    )
