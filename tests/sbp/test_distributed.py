"""Joining processes: what the environment says, and real jobs of two or four."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import time

import pytest

import sbp
from sbp import distributed

ROOT = pathlib.Path(__file__).parents[2]
TIME_LIMIT = 120  # seconds, for one job on a loaded machine

SLURM = {
    "SLURM_STEP_NODELIST": "node[03-05,09]",
    "SLURM_STEP_NUM_TASKS": "32",
    "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "10000",
}


@pytest.fixture
def run_job(tmp_path):
    """Runs a script on some processes; returns its exit code and its two outputs."""

    def run(source, num_processes):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        launcher = ["-m", "launch.run", "--nproc", str(num_processes)]
        done = subprocess.run(
            [sys.executable, *launcher, "--platform", "cpu", str(script)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def run_alone(source, **variables):
    """Runs a program in this environment and returns the last line of its errors."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_without_a_launcher_there_is_nothing_to_join():
    assert distributed._find_seat({}) is None
    sbp.init()
    sbp.init()


def test_launcher_gives_the_seat():
    seat = distributed._find_seat(
        SLURM
        | {
            "SBP_COORDINATOR": "127.0.0.1:29500",
            "SBP_NUM_PROCESSES": "4",
            "SBP_PROCESS_ID": "3",
        }
    )
    assert seat == distributed._Seat(
        coordinator="127.0.0.1:29500", num_processes=4, process_id=3
    )
    assert seat.bind_address == "127.0.0.1:29500"


def test_srun_gives_the_seat():
    seat = distributed._find_seat(SLURM)
    assert seat == distributed._Seat(
        coordinator=f"node03:{61440 + 10000 % 4096}",
        num_processes=32,
        process_id=17,
        local_devices=(1,),
    )
    assert seat.bind_address is None


def test_task_that_sees_one_gpu_takes_that():
    seat = distributed._find_seat(SLURM | {"CUDA_VISIBLE_DEVICES": "5"})
    assert seat.local_devices == (0,)


def test_shell_of_salloc_is_not_a_task():
    shell = {name: value for name, value in SLURM.items() if "NODELIST" not in name}
    assert distributed._find_seat(shell) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("a1,b[2-3]", "a1"),
        ("a[01-03,07],b2", "a01"),
        ("a[7,9-12]", "a7"),
        ("rack[1-2].cluster,b2", "rack1.cluster"),
    ],
)
def test_first_host_of_a_node_list(nodes, host):
    assert distributed._first_host(nodes) == host


@pytest.mark.parametrize(
    "values",
    [
        ("127.0.0.1:1", "4", "4"),
        ("127.0.0.1:1", "x", "0"),
        ("127.0.0.1:1", "0", "0"),
        ("127.0.0.1", "4", "0"),
        ("127.0.0.1:1", "4", None),
    ],
)
def test_variables_that_do_not_fit_are_named(values):
    pairs = zip(distributed.LAUNCH_VARIABLES, values, strict=True)
    environ = {name: value for name, value in pairs if value is not None}
    expected = f"SBP_NUM_PROCESSES={values[1]}, SBP_PROCESS_ID={values[2]}. They have"
    with pytest.raises(ValueError, match=expected):
        distributed._find_seat(environ)


@pytest.mark.parametrize(
    ("process_id", "message"),
    [
        (0, "Process 0 of 2 waited 1 s at 127.0.0.1:{} for all others to come."),
        (1, "Process 1 of 2 waited 1 s for the first one at 127.0.0.1:{} ("),
    ],
)
def test_absent_process_is_an_error_in_time(unused_port, process_id, message):
    error = run_alone(
        "import sbp; sbp.init(timeout_seconds=1)",
        SBP_COORDINATOR=f"127.0.0.1:{unused_port}",
        SBP_NUM_PROCESSES="2",
        SBP_PROCESS_ID=str(process_id),
    )
    assert f"TimeoutError: {message.format(unused_port)}" in error


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_init_after_the_first_array_says_where_it_belongs(unused_port):
    error = run_alone(
        "import jax, sbp; jax.devices(); sbp.init()",
        SBP_COORDINATOR=f"127.0.0.1:{unused_port}",
        SBP_NUM_PROCESSES="2",
        SBP_PROCESS_ID="0",
    )
    assert "RuntimeError: sbp.init() comes too late" in error
    assert "Call it right after the imports" in error


def test_two_processes_share_one_placement(run_job):
    code, out, err = run_job(
        """
        import sbp
        sbp.init()
        sbp.init()  # once more changes nothing
        import jax
        import numpy as np

        placement = sbp.placement("cpu", ranks=[1, 0], axis_names=["data"])
        x = sbp.to_global(np.arange(4.0), placement, sbp.split(0))
        shard = x.addressable_shards[0].data
        print(jax.process_index(), jax.device_count(), jax.typeof(x), shard)
        whole = sbp.to_global(x, sbp=sbp.broadcast)
        print(whole.addressable_shards[0].data)
        """,
        2,
    )
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0] 0 2 float32[4@data] [2. 3.]",
        "[0] [0. 1. 2. 3.]",
        "[1] 1 2 float32[4@data] [0. 1.]",
        "[1] [0. 1. 2. 3.]",
    ]


def test_machines_count_their_processes_through(tmp_path, unused_port):
    script = tmp_path / "script.py"
    script.write_text(
        "import sbp; sbp.init(); import jax; print(jax.process_count())\n"
    )
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "launch.run", "--nproc", "1", "--platform", "cpu"]
            + ["--nnodes", "2", "--node_rank", str(node_rank)]
            + ["--coordinator", f"127.0.0.1:{unused_port}", str(script)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for node_rank in (1, 0)
    ]
    outs = [node.communicate(timeout=TIME_LIMIT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert outs == ["[1] 2\n", "[0] 2\n"]


def test_failed_rank_does_not_wait_for_the_others_at_exit(run_job):
    start = time.monotonic()
    code, _, err = run_job(
        """
        import sbp
        sbp.init()
        import jax
        import numpy as np

        placement = sbp.placement("cpu", ranks=[0, 1], axis_names=["data"])
        x = sbp.to_global(np.arange(4.0), placement, sbp.split(0))
        if jax.process_index() == 1:
            raise ValueError("boom")
        sbp.to_global(x, sbp=sbp.broadcast)  # waits for rank 1
        """,
        2,
    )
    assert code == 1
    assert "[1] ValueError: boom" in err
    assert "launch.run: rank 1 ended with exit code 1; ending 1 rank." in err
    assert time.monotonic() - start < TIME_LIMIT / 2


def test_process_that_called_too_little_is_found(run_job):
    code, _, err = run_job(
        """
        import sbp
        sbp.init(timeout_seconds=2)
        import jax
        import numpy as np

        placement = sbp.placement("cpu", ranks=[0, 1], axis_names=["data"])
        x = sbp.to_global(np.arange(4.0), placement, sbp.split(0))
        if jax.process_index() == 0:
            sbp.to_global(x, sbp=sbp.broadcast)  # waits for the call of rank 1
        """,
        2,
    )
    assert code == 1
    assert "[1] Process 1 of 2 is done, but others are not 2 s later." in err
    assert "every process makes the same calls in the same order" in err


def is_free(job):
    """Returns whether the port that is derived from a job's number can be used."""
    port = distributed._find_seat(SLURM | {"SLURM_JOB_ID": str(job)}).coordinator
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", int(port.split(":")[1]))) != 0


def test_two_tasks_of_srun_make_a_job():
    job = next(job for job in range(os.getpid(), os.getpid() + 100) if is_free(job))
    tasks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sbp, jax; sbp.init(); print(jax.device_count())",
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task),
                "SLURM_JOB_ID": str(job),
                "JAX_NUM_CPU_DEVICES": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]
    outs = [task.communicate(timeout=TIME_LIMIT)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    assert [out.splitlines()[-1] for out in outs] == ["2", "2"]


def test_uncaught_error_leaves_at_once_without_the_launcher_too(unused_port):
    job = {"SBP_COORDINATOR": f"127.0.0.1:{unused_port}", "SBP_NUM_PROCESSES": "2"}
    source = "import sbp, time; sbp.init(); {}"
    peer = subprocess.Popen(
        [sys.executable, "-c", source.format("time.sleep(1000)")],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "SBP_PROCESS_ID": "0", **job},
    )
    try:
        error = run_alone(source.format("1 / 0"), SBP_PROCESS_ID="1", **job)
    finally:
        peer.terminate()  # SIGTERM is not caught, unless asked for
        assert peer.wait(timeout=TIME_LIMIT) == -15
    assert error == "ZeroDivisionError: division by zero"


def test_wrong_input_raises_on_every_rank_and_nothing_hangs(run_job):
    code, out, err = run_job(
        """
        import sbp
        sbp.init()
        import jax
        import numpy as np

        placement = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
        line = sbp.placement("cpu", range(4), ["data"])
        S, B, P = sbp.split, sbp.broadcast, sbp.partial_sum
        x = sbp.to_global(np.ones((4, 4)), placement, (S(0), B))
        y = sbp.to_global(np.ones((4, 4)), line, S(0))
        rank = jax.process_index()

        def from_local(shape, dtype=np.float32):
            return sbp.from_local({rank: np.ones(shape, dtype)}, line, S(0))

        wrong = {
            "length": lambda: sbp.to_global(x, sbp=(B, B, B)),
            "empty": lambda: sbp.to_global(x, sbp=()),
            "made_length": lambda: sbp.zeros((4, 4), placement=placement, sbp=B),
            "dim": lambda: sbp.to_global(x, sbp=(S(2), B)),
            "negative_dim": lambda: sbp.to_global(x, sbp=(S(-3), B)),
            "dim_type": lambda: S(1.5),
            "divide": lambda: sbp.to_global(np.ones((5, 4)), placement, (S(0), B)),
            "kind": lambda: sbp.to_global(x, sbp=("S(0)", 1)),
            "rank": lambda: sbp.placement("cpu", [0, 4]),
            "negative_rank": lambda: sbp.placement("cpu", [0, -1]),
            "twice": lambda: sbp.placement("cpu", [0, 0]),
            "type": lambda: sbp.placement("abacus", [0, 1]),
            "nowhere": lambda: sbp.to_global(np.ones(4)),
            "no_signature": lambda: sbp.signature_of(np.ones(4)),
            "two_placements": lambda: sbp.add(x, y),
            "random_sum": lambda: sbp.rand((4, 4), seed=0, placement=line, sbp=P),
            "unbalanced": lambda: from_local((2 + 2 * (rank > 0), 4)),
            "dtypes": lambda: from_local((2,), np.int32 if rank else np.float32),
            "own_data": lambda: sbp.tensor(np.full(4, rank), placement=line, sbp=B),
        }
        for name, call in wrong.items():
            try:
                call()
            except (TypeError, ValueError) as error:
                print(name, str(error).splitlines()[0])
            whole = sbp.to_global(x, sbp=(B, B))  # all ranks still go together
            assert float(whole.addressable_shards[0].data.sum()) == 16
        """,
        4,
    )
    assert (code, err) == (0, "")
    said = [line.split(" ", 1) for line in out.splitlines()]
    by_rank = {f"[{rank}]": [] for rank in range(4)}
    for rank, text in said:
        by_rank[rank].append(text)
    assert len(by_rank["[0]"]) == 19  # each of them is an error
    assert all(texts == by_rank["[0]"] for texts in by_rank.values())
