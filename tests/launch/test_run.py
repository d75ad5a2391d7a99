"""Starting, watching and ending processes. Most scripts here do without JAX."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TIME_LIMIT = 60  # seconds, for one launch on a loaded machine

# A shell's background job ignores SIGINT, and so would all that it starts.
LAUNCHER = """if True:
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    program = [sys.executable, "-m", "launch.run", *sys.argv[1:]]
    os.execv(sys.executable, program)
"""
# Prints its process and one that it starts, then waits for a very long time.
SLEEPER = """
    import os, signal, subprocess, sys, time
    child = subprocess.Popen(["sleep", "1000"])
    print("pids", os.getpid(), child.pid)
    time.sleep(1000)
"""


@pytest.fixture
def write(tmp_path):
    def write_script(source, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write_script


@pytest.fixture
def start():
    """Starts the launcher, and kills what a failed test leaves of it."""
    started = []

    def start_launcher(*arguments, **options):
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *arguments],
            cwd=options.pop("cwd", ROOT),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield start_launcher
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def launch(start):
    def launch_and_wait(*arguments, **options):
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=TIME_LIMIT)
        return process.returncode, out, err

    return launch_and_wait


def read_pids(process, num_ranks):
    """Returns the processes that ``num_ranks`` sleepers report."""
    lines = [process.stdout.readline() for _ in range(num_ranks)]
    pids = [int(pid) for line in lines for pid in line.split("pids")[1].split()]
    assert len(pids) == 2 * num_ranks
    return pids


def wait_until_gone(pids):
    """Fails if one of the processes is still running after some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        states = subprocess.run(
            ["ps", "-o", "pid=,stat=", "-p", ",".join(map(str, pids))],
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        alive = [state for state in states if " Z" not in state]
        if not alive:
            return
        time.sleep(0.05)
    pytest.fail(f"still running: {alive}")


def test_every_line_of_either_stream_begins_with_its_rank(launch, write):
    script = write("""
        import os, sys
        rank = os.environ["SBP_PROCESS_ID"]
        print("out", rank, sys.argv[1:])
        print("error", rank, file=sys.stderr)
        print("[Gloo] Rank 0 is connected to 1 peer ranks.")
        print("10 %", end="\\r")
        print("no newline", end="")
    """)
    code, out, err = launch("--nproc", "2", script, "--lr=1", "-x")
    assert code == 0
    assert sorted(re.split("[\r\n]", out)) == [
        "",
        "[0] 10 %",
        "[0] no newline",
        "[0] out 0 ['--lr=1', '-x']",
        "[1] 10 %",
        "[1] no newline",
        "[1] out 1 ['--lr=1', '-x']",
    ]
    assert sorted(err.splitlines()) == ["[0] error 0", "[1] error 1"]


def test_line_without_end_goes_out_in_pieces(launch, write):
    code, out, _ = launch("--nproc", "1", write("print('x' * 300_000)"))
    assert code == 0
    assert out.count("x") == 300_000


def test_module_runs_as_main_with_its_arguments(launch, write):
    script = write("import sys; print(__name__, sys.argv[1:])", "a_module.py")
    code, out, _ = launch(
        "--nproc", "1", "-m", "a_module", "--y", cwd=os.path.dirname(script)
    )
    assert (code, out) == (0, "[0] __main__ ['--y']\n")


def test_script_imports_its_neighbors_and_the_packages_of_the_root(launch, write):
    write("value = 7", "neighbor.py")
    script = write("import launch, neighbor; print(neighbor.value)")
    code, out, _ = launch("--nproc", "1", script)
    assert (code, out) == (0, "[0] 7\n")


@pytest.mark.parametrize(
    ("ending", "code", "report"),
    [
        ("raise SystemExit(3)", 3, "rank 1 ended with exit code 3"),
        ("sys.exit('no data')", 1, "rank 1 ended with exit code 1"),
        ("raise ValueError('boom')", 1, "rank 1 ended with exit code 1"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by SIGKILL"),
        ("os.abort()", 134, "rank 1 was ended by SIGABRT"),
        ("os._exit(200)", 200, "rank 1 ended with exit code 200"),
    ],
    ids=["exit", "exit_text", "exception", "killed", "aborted", "high_code"],
)
def test_first_failure_ends_all_and_gives_the_exit_code(
    launch, write, ending, code, report
):
    script = write(f"""
        import os, sys, time
        if os.environ["SBP_PROCESS_ID"] == "1":
            {ending}
        time.sleep(1000)
    """)
    got, _, err = launch("--nproc", "3", script)
    assert got == code
    assert f"launch.run: {report}" in err
    assert "; ending 2 ranks." in err
    last = "launch.run: rank 1 was the first to fail; its lines begin [1]."
    assert err.splitlines()[-1] == last


def test_stack_trace_begins_in_the_script(launch, write):
    script = write("def fail():\n    raise ValueError('boom')\n\nfail()\n")
    _, _, err = launch("--nproc", "1", script)
    assert [line for line in err.splitlines() if "File" in line] == [
        f'[0]   File "{script}", line 4, in <module>',
        f'[0]   File "{script}", line 2, in fail',
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_reaches_all_and_leaves_nothing(start, write, number):
    process = start("--nproc", "2", write(SLEEPER))
    pids = read_pids(process, 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 128 + number
    assert (
        f"{signal.Signals(number).name} (once more to kill at once); ending 2 ranks."
        in err
    )
    assert "Traceback" not in err
    wait_until_gone(pids)


def test_script_may_end_well_on_sigterm_and_the_code_still_says_so(start, write):
    script = write("""
        import signal, sys, time
        def save(number, frame):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready")
        time.sleep(1000)
    """)
    process = start("--nproc", "1", script)
    assert process.stdout.readline() == "[0] ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TIME_LIMIT)
    assert (process.returncode, out) == (143, "[0] saved\n")


STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


def test_who_stays_is_killed_after_the_grace(start, write):
    script = write(STUBBORN + textwrap.dedent(SLEEPER))
    process = start("--nproc", "1", "--grace_seconds", "0.2", script)
    pids = read_pids(process, 1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 130
    wait_until_gone(pids)


def test_second_signal_kills_at_once(start, write):
    script = write(STUBBORN + textwrap.dedent(SLEEPER))
    process = start("--nproc", "1", "--grace_seconds", "1000", script)
    pids = read_pids(process, 1)
    process.send_signal(signal.SIGINT)
    assert "SIGINT" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 130
    wait_until_gone(pids)


def test_killed_launcher_leaves_nothing(start, write):
    process = start("--nproc", "2", write(SLEEPER))
    pids = read_pids(process, 2)
    process.kill()
    wait_until_gone(pids)


def test_closed_output_ends_the_job(start, write):
    script = write(SLEEPER.replace("time.sleep(1000)", "while True: print('x' * 1000)"))
    process = start("--nproc", "1", script)
    pids = read_pids(process, 1)
    process.stdout.close()
    assert process.wait(timeout=TIME_LIMIT) == 141
    wait_until_gone(pids)


def test_script_may_save_when_its_output_is_closed(start, write, tmp_path):
    script = write(f"""
        import pathlib, signal, sys, time
        def save(number, frame):
            print("saving", "x" * 1_000_000)  # more than a pipe holds
            pathlib.Path("{tmp_path}", "saved").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        while True:
            print("ready")
            time.sleep(0.01)
    """)
    process = start("--nproc", "2", script)
    assert process.stdout.readline().endswith("ready\n")
    process.stdout.close()
    assert "nobody reads the output any more" in process.stderr.read()
    assert process.wait(timeout=TIME_LIMIT) == 141
    assert (tmp_path / "saved").exists()


def test_what_a_rank_leaves_behind_ends_with_it(launch, write):
    script = write(SLEEPER.replace("time.sleep(1000)", ""))
    code, out, _ = launch("--nproc", "1", script)
    assert code == 0
    wait_until_gone([int(pid) for pid in out.split("pids")[1].split()])


@pytest.mark.slow
def test_training_on_two_processes_saves_on_ctrl_c(start, tmp_path):
    process = start(
        *("--nproc", "2", "--platform", "cpu", "-m", "launch.train"),
        *("--config=configs/bert_tiny.py", f"--workdir={tmp_path}/run"),
        *("--config.train.num_steps=100000", "--config.train.log_every=1"),
    )
    lines = iter(process.stdout.readline, "")
    assert any("/100000" in line for line in lines)  # a step is done
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 130
    assert "stopping after this step, with a checkpoint" in err
    assert out.count("saved step") == 1  # the first rank speaks for all
    assert "Traceback" not in err
