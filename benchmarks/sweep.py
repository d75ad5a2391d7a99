r"""How fast are many layouts? Runs a matrix of named cases, one process each.

    python -m benchmarks.sweep --matrix=benchmarks/matrices/cpu_small.yaml \
        --workdir=runs/sweep

Uses the devices present, or virtual CPU devices. Writes ``results.jsonl``, a line per
case, ``results.md`` and ``results.png`` to the workdir, after each case anew. A case
that fails is recorded with its error and does not stop the others. Run it again to go
on: cases that are done are not repeated, failed ones are tried again. The names of
cases are explained in `benchmarks.sweep_cases`.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import sweep_report
from benchmarks.sweep_cases import Case, load_matrix

Record = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Runs what is not done yet; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep")
    parser.add_argument("--matrix", required=True, help="file of cases, .yaml")
    parser.add_argument("--workdir", required=True, help="folder of the results")
    parser.add_argument("--num_runs", type=int, default=10, help="steps of each case")
    parser.add_argument(
        "--timeout_seconds", type=float, default=1800, help="of each case"
    )
    options = parser.parse_args(arguments)
    try:
        cases = load_matrix(options.matrix)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    workdir = pathlib.Path(options.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    results = workdir / "results.jsonl"
    done = read_records(results)
    for number, case in enumerate(cases, start=1):
        task = describe(case, options.num_runs)
        place = f"{number}/{len(cases)} {case.key}"
        if is_done(done.get(case.key), task):
            print(f"{place}: done before", flush=True)
            continue
        record = task | run(case, task, options.timeout_seconds)
        done[case.key] = record
        append(results, record)
        sweep_report.write(workdir, [done[c.key] for c in cases if c.key in done])
        print(f"{place}: {sweep_report.summary(record)}", flush=True)
    sweep_report.write(workdir, [done[c.key] for c in cases])
    print(f"See {workdir / 'results.md'} and {workdir / 'results.png'}.")
    return int(any(done[case.key]["status"] != "ok" for case in cases))


def describe(case: Case, num_runs: int) -> Record:
    """Returns what a record says of the case itself."""
    return {
        "case": case.key,
        "group": case.group,
        "num_devices": case.num_devices,
        "config": case.config,
        "fields": case.overrides,
        "num_runs": num_runs,
    }


def read_records(path: pathlib.Path) -> dict[str, Record]:
    """Returns the last record of each case; a line that was cut short is left out."""
    records = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records[record["case"]] = record
    return records


def append(path: pathlib.Path, record: Record) -> None:
    """Adds a line, after one that was cut short too."""
    text = path.read_text() if path.exists() else ""
    start = "" if text.endswith("\n") or not text else "\n"
    with path.open("a") as file:
        file.write(f"{start}{json.dumps(record)}\n")


def is_done(record: Record | None, task: Record) -> bool:
    """Returns whether a record is a result of this very task."""
    if record is None or record["status"] != "ok":
        return False
    return all(record.get(name) == value for name, value in _as_json(task).items())


def run(case: Case, task: Record, timeout_seconds: float) -> Record:
    """Runs a case in a process of its own; returns its result, or why there is none."""
    num_hosts = case.sizes["hosts"]
    if num_hosts > 1:
        return _failed(
            f"The case is for {num_hosts} hosts, but a sweep runs on one. Start"
            " launch.train with launch.run on each host instead."
        )
    command = [sys.executable, "-m", "benchmarks.sweep_child", json.dumps(task)]
    try:
        finished = subprocess.run(
            command,
            env=visible_devices(os.environ, case.num_devices),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return _failed(f"It took longer than --timeout_seconds={timeout_seconds:g}.")
    lines = finished.stdout.strip().splitlines()
    if finished.returncode or not lines:
        code = finished.returncode
        return _failed(f"Exit code {code}. {_last_words(finished.stderr)}")
    return {"status": "ok", **json.loads(lines[-1])}


def visible_devices(environment: Mapping[str, str], num_devices: int) -> dict[str, str]:
    """Returns the environment in which a process sees so many GPUs, the first ones.

    Where there are no GPUs it changes nothing: virtual CPU devices are made on demand.

    Example:
        >>> visible_devices({"CUDA_VISIBLE_DEVICES": "4,5,6"}, 2)
        {'CUDA_VISIBLE_DEVICES': '4,5'}
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(i) for i in range(num_devices)]
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(names[:num_devices])}


def _last_words(errors: str) -> str:
    """Returns the end of what a process complained of, without stacks of C++."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("@ ", "***"))]
    return "\n".join(lines[-4:]) or "It printed nothing."


def _failed(error: str) -> Record:
    return {"status": "failed", "error": error}


def _as_json(record: Record) -> Record:
    return json.loads(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
