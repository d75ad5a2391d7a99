"""Named cases of a sweep: ``nl24_bf16_2x2x2_ac_mb4_gb32_1n8g``, after LiBai's naming.

=========  =======================================================================
part       means
=========  =======================================================================
nl24       24 layers
bf16       dtype of the computation: ``fp32``, ``bf16`` or ``fp16``
2x2x2      data x tensor x stage
ac         full recomputation of activations; left out if there is none
mb4        samples of a microbatch, on one data-parallel rank
gb32       samples of a step, on all
1n8g       hosts, and devices of each
=========  =======================================================================
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NAME = re.compile(
    r"nl(?P<layers>\d+)_(?P<dtype>fp32|bf16|fp16)"
    r"_(?P<data>\d+)x(?P<tensor>\d+)x(?P<stage>\d+)(?P<recompute>_ac)?"
    r"_mb(?P<microbatch>\d+)_gb(?P<batch>\d+)_(?P<hosts>\d+)n(?P<devices>\d+)g"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case.

    Attributes:
        name: In the form above.
        label: Tells apart cases of the same name; empty if there is no need.
        config: Config file.
        fields: Values by dotted field, besides those that the name gives.
    """

    name: str
    label: str
    config: str
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Name and label, unique in a matrix."""
        return f"{self.name}-{self.label}" if self.label else self.name

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers in the name."""
        found = _match(self.name)
        return {name: int(v) for name, v in found.items() if v and v.isdigit()}

    @property
    def num_devices(self) -> int:
        """Devices of the run."""
        return self.sizes["hosts"] * self.sizes["devices"]

    @property
    def group(self) -> str:
        """What cases have in common whose throughputs can be compared."""
        found = _match(self.name)
        config = pathlib.Path(self.config).stem
        recompute = found["recompute"] or ""
        return f"{config} nl{found['layers']}_{found['dtype']}{recompute}"

    @property
    def overrides(self) -> dict[str, Any]:
        """All fields of the config that the case sets."""
        sizes, found = self.sizes, _match(self.name)
        return {
            "model.num_layers": sizes["layers"],
            "model.dtype": DTYPES[found["dtype"]],
            "dist.data_parallel_size": sizes["data"],
            "dist.tensor_parallel_size": sizes["tensor"],
            "dist.pipeline_parallel_size": sizes["stage"],
            "remat": "full" if found["recompute"] else "none",
            "train.global_batch_size": sizes["batch"],
            "train.num_microbatches": sizes["batch"]
            // (sizes["microbatch"] * sizes["data"]),
            **self.fields,
        }

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule of the name."""
        if NAME.fullmatch(self.name) is None:
            yield (
                f"{self.name}: not a name of the form"
                " nl24_fp32_2x2x2_ac_mb4_gb32_1n8g (layers, dtype, data x tensor x"
                " stage, recomputation, microbatch, global batch, hosts and devices)."
            )
            return
        sizes = self.sizes
        num_parts = sizes["data"] * sizes["tensor"] * sizes["stage"]
        if num_parts != self.num_devices:
            yield (
                f"{self.key}: {sizes['data']}x{sizes['tensor']}x{sizes['stage']} is"
                f" {num_parts} devices, but {sizes['hosts']}n{sizes['devices']}g is"
                f" {self.num_devices}. Make them equal."
            )
        at_once = sizes["microbatch"] * sizes["data"]
        if not at_once or sizes["batch"] % at_once:
            yield (
                f"{self.key}: gb{sizes['batch']} is not divisible by"
                f" mb{sizes['microbatch']} x {sizes['data']} data-parallel ranks."
                " Change one of them."
            )


def load_matrix(path: str) -> list[Case]:
    """Returns the cases of a matrix file, in its order.

    The file is YAML: ``config`` and ``fields`` are those of all cases; ``cases`` is a
    list, each a name, or a mapping with ``name`` and any of ``label``, ``config`` and
    ``fields``.

    Raises:
        ValueError: If there is no such file or it breaks rules; all are named.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"--matrix={path}: there is no such file.")
    try:
        matrix = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--matrix={path}: {' '.join(str(error).split())}") from None
    if not isinstance(matrix, dict) or not isinstance(matrix.get("cases"), list):
        raise ValueError(
            f"--matrix={path}: it is not a mapping with a list of 'cases'. See"
            " benchmarks/matrices for an example."
        )
    cases = [_to_case(entry, matrix) for entry in matrix["cases"]]
    broken = [rule for case in cases for rule in case.broken_rules()]
    keys = [case.key for case in cases]
    broken += [
        f"{key}: there are {keys.count(key)} cases of this name. Give each a 'label'."
        for key in dict.fromkeys(keys)
        if keys.count(key) > 1
    ]
    if broken:
        rules = "1 rule" if len(broken) == 1 else f"{len(broken)} rules"
        raise ValueError(f"--matrix={path} breaks {rules}:\n  " + "\n  ".join(broken))
    return cases


def _to_case(entry: Any, matrix: Mapping[str, Any]) -> Case:
    own: dict[str, Any] = {"name": entry} if isinstance(entry, str) else dict(entry)
    return Case(
        name=str(own.get("name", "")),
        label=str(own.get("label", "")),
        config=own.get("config", matrix.get("config", "configs/base.py")),
        fields={**matrix.get("fields", {}), **own.get("fields", {})},
    )


def _match(name: str) -> dict[str, str]:
    match = NAME.fullmatch(name)
    assert match, "broken_rules comes first"
    return match.groupdict()
