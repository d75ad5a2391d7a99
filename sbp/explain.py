"""``sbp.explain``: what a function would compute and communicate, line by line."""

import collections
import dataclasses
import html
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from sbp import boxing
from sbp._compat import source_line
from sbp.deduction.program import Conversion, Instruction, Program
from sbp.infer import FallbackWarning, Jitted, jit
from sbp.signature import PartialSum, Signature, Split, short

# Frames of these libraries are passed over when an operation's line is looked for.
LIBRARIES = ("flax", "jax", "jaxlib", "sbp")
COLUMNS = ("line", "operation", "inputs", "results", "communication", "bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Attributes:
        name: ``'all-reduce'``, ``'all-gather'``, ``'reduce-scatter'``,
            ``'all-to-all'`` or ``'collective-permute'``.
        axes: Mesh axes that it acts along.
        num_bytes: Bytes that each device receives.
        num_messages: Collectives in the compiled program: more than one only for
            collective-permutes.
    """

    name: str
    axes: tuple[str, ...]
    num_bytes: int
    num_messages: int = 1

    def __str__(self) -> str:
        return f"{self.name} over {' and '.join(self.axes)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One operation.

    Attributes:
        source: File and line of the program, or empty if unknown.
        operation: Name of the primitive, or ``'result'`` for what is converted last.
        depth: In how many loops or branches it stands.
        times: How often it runs. The body of a ``while`` loop counts once.
        inputs: Signature of each operand, as the operation needs it.
        outputs: Signature of each result.
        types: Type of each result, as JAX prints it.
        conversions: Signature before and after, for each operand that is converted.
        collectives: What is communicated, for the operands and inside the operation.
        note: What else there is to know, or empty.
    """

    source: str
    operation: str
    depth: int
    times: int
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    types: tuple[str, ...]
    conversions: tuple[tuple[Signature, Signature], ...]
    collectives: tuple[Collective, ...]
    note: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes that each device receives, all times together."""
        return self.times * sum(c.num_bytes for c in self.collectives)


class Explanation(Sequence[Record]):
    """The operations of a function in order; prints as a table."""

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        self.name = name
        self.records = tuple(records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    @property
    def num_bytes(self) -> int:
        """Bytes that each device receives in all."""
        return sum(record.num_bytes for record in self.records)

    @property
    def collectives(self) -> dict[str, int]:
        """How many collectives of each name run.

        Example:
            >>> Explanation("f", []).collectives
            {}
        """
        counts: collections.Counter[str] = collections.Counter()
        for record in self.records:
            for collective in record.collectives:
                counts[collective.name] += record.times * collective.num_messages
        return dict(counts)

    def communicating(self) -> "Explanation":
        """Returns the explanation of those operations alone that communicate."""
        return Explanation(self.name, [r for r in self.records if r.collectives])

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns the records as dictionaries, as a data frame takes them."""
        return [
            dataclasses.asdict(record) | {"num_bytes": record.num_bytes}
            for record in self.records
        ]

    def __str__(self) -> str:
        table = Table(*COLUMNS, title=self.name, box=rich.box.SIMPLE_HEAD)
        table.columns[-1].justify = "right"
        for row in self._rows():
            table.add_row(*row)
        table.add_section()
        table.add_row("", "total", "", "", self._summary(), f"{self.num_bytes:,}")
        stream = io.StringIO()
        Console(file=stream, width=140).print(table, markup=False)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = "".join(f"<th>{column}</th>" for column in COLUMNS)
        total = ("", "total", "", "", self._summary(), f"{self.num_bytes:,}")
        rows = "".join(
            "<tr>" + "".join(f"<td>{_to_html(cell)}</td>" for cell in row) + "</tr>"
            for row in (*self._rows(), total)
        )
        caption = f"<caption>{html.escape(self.name)}</caption>"
        return f"<table>{caption}<tr>{header}</tr>{rows}</table>"

    def _summary(self) -> str:
        counts = (f"{count} {name}" for name, count in self.collectives.items())
        return ", ".join(counts) or "no communication"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for record in self.records:
            times = f" x{record.times}" if record.times > 1 else ""
            yield (
                record.source,
                "  " * record.depth + record.operation + times,
                " ".join(map(short, record.inputs)),
                " ".join(record.types),
                "\n".join(_communication(record)),
                f"{record.num_bytes:,}" if record.collectives else "",
            )


def explain(
    function: Callable[..., Any] | Jitted, *args: Any, **kwargs: Any
) -> Explanation:
    """Returns what ``sbp.jit(function)`` does with such arguments, and runs nothing.

    Args:
        function: A function of plain arrays, or what ``sbp.jit`` returned.
        *args: Global tensors, or ``jax.ShapeDtypeStruct`` with a sharding.
        **kwargs: Likewise.

    Returns:
        A sequence of `Record`, one for each operation. Its text is a table, in
        notebooks too; ``num_bytes`` and ``collectives`` are the totals.

    Raises:
        ValueError: As ``sbp.jit`` does.

    Example:
        >>> import jax.numpy as jnp, sbp
        >>> p = sbp.placement("cpu", [0, 1], ("tensor",))
        >>> x = sbp.to_global(jnp.ones((4, 8)), p, sbp.split(1))
        >>> w = sbp.to_global(jnp.ones((8, 6)), p, sbp.split(0))
        >>> explained = sbp.explain(lambda x, w: jnp.tanh(x @ w), x, w)
        >>> explained.collectives, explained.num_bytes
        ({'all-reduce': 1}, 96)
        >>> [(r.operation, r.types[0]) for r in explained]
        [('dot_general', 'float32[4,6]{U:tensor}'), ('tanh', 'float32[4,6]')]
    """
    jitted = function if isinstance(function, Jitted) else jit(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # a note says it
        program = jitted.compile(*args, **kwargs).program
    name = getattr(jitted.function, "__name__", "function")
    hidden = _folders(LIBRARIES)
    return Explanation(name, list(_records(program, hidden, depth=0, times=1)))


def _folders(packages: Sequence[str]) -> list[str]:
    """Returns the folders of those packages that are installed."""
    specs = [importlib.util.find_spec(package) for package in packages]
    return [
        folder
        for spec in specs
        if spec is not None
        for folder in spec.submodule_search_locations or ()
    ]


def _records(
    program: Program, hidden: Sequence[str], depth: int, times: int
) -> Iterator[Record]:
    for instruction in program.instructions:
        operation = instruction.operation
        pairs = zip(operation.outputs, instruction.outputs, strict=True)
        yield Record(
            source=source_line(operation.sources, hidden),
            operation=operation.name,
            depth=depth,
            times=times,
            inputs=instruction.inputs,
            outputs=instruction.outputs,
            types=tuple(_type(program, value, s) for value, s in pairs),
            conversions=_pairs(instruction.conversions),
            collectives=(*_moved(instruction.conversions), *_combined(instruction)),
            note="no rule: computed everywhere" if instruction.is_fallback else "",
        )
        turns = operation.params.get("length", 1) if operation.name == "scan" else 1
        for body in instruction.bodies:
            yield from _records(body, hidden, depth + 1, times * turns)
    for conversion in program.conversions:
        yield Record(
            source="",
            operation="result",
            depth=depth,
            times=times,
            inputs=(conversion.source,),
            outputs=(conversion.target,),
            types=(_type(program, conversion.value, conversion.target),),
            conversions=_pairs([conversion]),
            collectives=_moved([conversion]),
        )


def _type(program: Program, number: int, signature: Signature) -> str:
    """Returns a type as JAX prints it: ``float32[8@data,16]{U:tensor}``."""
    value = program.region.values[number]
    pairs = list(zip(signature, (name for name, _ in program.axes), strict=True))
    dims = []
    for dim, size in enumerate(value.shape):
        names = [name for c, name in pairs if c == Split(dim)]
        axes = f"({','.join(names)})" if len(names) > 1 else "".join(names)
        dims.append(f"{size}@{axes}" if names else str(size))
    parts = [name for c, name in pairs if isinstance(c, PartialSum)]
    unreduced = f"{{U:{','.join(parts)}}}" if parts else ""
    return f"{value.dtype}[{','.join(dims)}]{unreduced}"


def _pairs(
    conversions: Sequence[Conversion],
) -> tuple[tuple[Signature, Signature], ...]:
    return tuple((c.source, c.target) for c in conversions)


def _moved(conversions: Sequence[Conversion]) -> tuple[Collective, ...]:
    steps: list[boxing.Step] = [step for c in conversions for step in c.steps]
    return tuple(
        Collective(step.collective, step.axes, step.num_bytes, step.num_messages)
        for step in steps
        if not step.is_free
    )


def _combined(instruction: Instruction) -> tuple[Collective, ...]:
    num_results = len(instruction.outputs)
    return tuple(
        Collective("all-reduce", c.axes, c.num_bytes, num_results)
        for c in instruction.combines
    )


def _communication(record: Record) -> list[str]:
    lines = [
        f"{short(source)} -> {short(target)}" for source, target in record.conversions
    ]
    is_sum = len(record.collectives) > 1  # else the bytes column says it
    lines += [
        f"  {c}, {c.num_bytes:,} bytes" if is_sum else f"  {c}"
        for c in record.collectives
    ]
    return lines + ([record.note] if record.note else [])


def _to_html(cell: str) -> str:
    text = html.escape(cell).replace("\n", "<br>")
    return text.replace("  ", "&nbsp;&nbsp;")
