r"""What does each technique save? Read from compiled programs; nothing is run.

    JAX_PLATFORMS=cpu python -m benchmarks.memory --write=docs/memory.md

compiles the training step of each row of `TABLES` for devices that need not be there,
and prints the bytes that one of them needs: arguments, which are the training state and
the batch, and what the step needs besides. ``--tables`` names some of them.
"""

import argparse
import dataclasses
import datetime
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from launch import distributed, families, job, resolve, state, step, virtual_gpus
from launch.run_config import RunConfig
from models import remat

CPU = "cpu"
Fields = dict[str, Any]
Rows = dict[str, Fields]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Training steps to compare.

    Attributes:
        title: What is common to them.
        config: Config file.
        target: `CPU`, or a kind of GPU of `virtual_gpus`.
        fields: What all rows change.
        rows: What each row changes besides, by its name.
    """

    title: str
    config: str
    target: str
    fields: Fields
    rows: Rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What one device needs.

    Attributes:
        arguments: Training state and batch.
        temporary: Activations, gradients, and whatever else lives in a step.
        host: In the memory of the host.
    """

    arguments: int
    temporary: int
    host: int

    @property
    def total(self) -> int:
        """In the memory of the device."""
        return self.arguments + self.temporary


DATA, TENSOR = "dist.data_parallel_size", "dist.tensor_parallel_size"
ZERO, REMAT, ATTENTION = "zero.stage", "remat", "model.attention"
LOSS_CHUNK = "model.loss_chunk_size"
FULL: Fields = {REMAT: "full"}
SELECTIVE: Fields = {REMAT: "selective"}
ON_HOST = ("mlp_up", "mlp_activation")
OFFLOAD: Fields = {
    REMAT: {name: "offload" if name in ON_HOST else "save" for name in remat.NAMES}
}
RECOMPUTATION: Rows = {
    "nothing": {REMAT: "none"},
    "`selective`": SELECTIVE,
    "`full`": FULL,
}
HOST: Rows = {"`selective`, hidden values of the MLP on the host": OFFLOAD}
ZERO_STAGES: Rows = {
    f"`selective`, ZeRO {stage}": SELECTIVE | {ZERO: stage} for stage in (1, 2, 3)
}
ZERO_3: Rows = {"`selective`, ZeRO 3": SELECTIVE | {ZERO: 3}}
CUDNN: Rows = {"`selective`, cuDNN attention": SELECTIVE | {ATTENTION: "cudnn"}}
BY_TWO: Fields = SELECTIVE | {DATA: 4, TENSOR: 2}
BY_TENSOR: Rows = {
    "`selective`, data 4 x tensor 2": BY_TWO,
    "`selective`, data 4 x tensor 2, sequence parallel": BY_TWO
    | {"dist.sequence_parallel": True},
}
COMMON: Fields = {
    DATA: 8,
    ATTENTION: "plain",
    LOSS_CHUNK: None,
    "train.num_microbatches": 1,
    "model.dropout_rate": 0.0,
    "model.attention_dropout_rate": 0.0,
}
GPT2: Rows = (
    {"float32, nothing": {REMAT: "none", "model.dtype": "float32"}}
    | RECOMPUTATION
    | HOST
    | ZERO_STAGES
    | CUDNN
    | {
        "`selective`, loss by chunks of 256": SELECTIVE | {LOSS_CHUNK: 256},
        "all of ZeRO 3, cuDNN, chunks, moments in bfloat16": SELECTIVE
        | {
            ZERO: 3,
            ATTENTION: "cudnn",
            LOSS_CHUNK: 256,
            "optim.state_dtype": "bfloat16",
        },
    }
    # 25 heads cannot be shared by two ranks.
    | {f"{k}, 20 heads": v | {"model.num_heads": 20} for k, v in BY_TENSOR.items()}
)
TABLES: Mapping[str, Table] = {
    "gpt2-h100": Table(
        title="GPT-2 1.5B in bfloat16, 8 H100, 4 samples of 1024 tokens on each",
        config="configs/gpt2_124m.py",
        target="h100-80g",
        fields=COMMON
        | {
            "model.dtype": "bfloat16",
            "model.num_layers": 48,
            "model.model_dim": 1600,
            "model.num_heads": 25,
            "model.mlp_dim": 6400,
            "data.seq_length": 1024,
            "train.global_batch_size": 32,
        },
        rows=GPT2,
    ),
    "bert-h100": Table(
        title="BERT-large in bfloat16, 8 H100, 16 samples of 512 tokens on each",
        config="configs/bert_large.py",
        target="h100-80g",
        fields=COMMON | {"model.dtype": "bfloat16", "train.global_batch_size": 128},
        rows=RECOMPUTATION | HOST | ZERO_3 | CUDNN | BY_TENSOR,
    ),
    "bert-cpu": Table(
        title="BERT-large in float32, 8 CPU devices, 2 samples of 512 tokens on each",
        config="configs/bert_large.py",
        target=CPU,
        fields=COMMON | {"model.dtype": "float32", "train.global_batch_size": 16},
        rows=RECOMPUTATION | ZERO_3 | BY_TENSOR,
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Prints the tables, and writes them into a page if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", allow_abbrev=False
    )
    parser.add_argument(
        "--tables", default=",".join(TABLES), help="names, by commas; all by default"
    )
    parser.add_argument("--write", help="page to write the tables into")
    options = parser.parse_args(arguments)
    names = options.tables.split(",")
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"--tables={','.join(unknown)}: choose from {', '.join(TABLES)}.")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    distributed.count_devices()  # sets flags that programs on CPU need
    jax.config.update("jax_num_cpu_devices", 8)
    for name in names:
        text = "\n".join(_lines(TABLES[name]))
        print(text, flush=True)
        if options.write:
            path = pathlib.Path(options.write)
            path.write_text(put_between(path.read_text(), name, text))


def measure(config: RunConfig, target: str) -> Bytes:
    """Returns what the training step needs on one device.

    Args:
        config: Of the run.
        target: See `Table`.
    """
    memory: Any = compile_step(config, target).memory_analysis()
    return Bytes(
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        host=memory.host_temp_size_in_bytes,
    )


def compile_step(config: RunConfig, target: str) -> Any:
    """Returns the compiled training step."""
    steps = job.build_steps(config, make_mesh(config, target))
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    program: Any = step.build_train_step(steps)
    return program.lower(abstract, families.batch_shapes(config)).compile()


def make_mesh(config: RunConfig, target: str) -> Mesh:
    """Returns the devices of a run."""
    dist = config.dist
    if target == CPU:
        count = resolve.DeviceCount(num_devices=dist.num_devices)
        return distributed.create_mesh(dist, count)
    return virtual_gpus.create_mesh(dist, target)


def resolve_row(table: Table, name: str) -> RunConfig:
    """Returns the config of a row."""
    values = resolve.load(table.config)
    fields = table.fields | table.rows[name]
    sizes = fields[DATA] * fields.get(TENSOR, 1)
    return resolve.resolve(
        values,
        {field: str(value) for field, value in fields.items()},
        resolve.DeviceCount(num_devices=sizes),
    )


def put_between(page: str, name: str, text: str) -> str:
    r"""Returns the page with the text between the comments that name a table.

    Example:
        >>> put_between("<!-- begin a -->old<!-- end a -->", "a", "new")
        '<!-- begin a -->\nnew\n<!-- end a -->'
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if not pattern.search(page):
        raise ValueError(f"The page has no place for {name!r}. Add {begin} and {end}.")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def _lines(table: Table) -> Iterator[str]:
    """Yields a table in Markdown, in GB of 10^9 bytes."""
    today = datetime.datetime.now(datetime.UTC).date()
    yield f"{table.title}; GB per device, compiled {today}:"
    yield ""
    yield "| computed again, and more | state and batch | besides | together | host |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name in table.rows:
        found = measure(resolve_row(table, name), table.target)
        sizes = found.arguments, found.temporary, found.total
        cells = [f"{size / 1e9:.2f}" for size in sizes]
        host = f"{found.host / 1e9:.2f}" if found.host else ""
        yield f"| {name} | {' | '.join(cells)} | {host} |"


if __name__ == "__main__":
    main(sys.argv[1:])
