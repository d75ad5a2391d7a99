"""What the launcher refuses, and what it tells each process."""

import pathlib
import socket

import pytest

from launch import run

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc 0: start at least 1 process."),
        (["--nnodes", "0"], "--nnodes 0: a job has at least 1 machine."),
        (
            ["--nnodes", "2", "--node_rank", "2", "--coordinator", "127.0.0.1:1"],
            "--node_rank 2: with --nnodes 2 it is 0 to 1.",
        ),
        (
            ["--node_rank", "1"],
            "--node_rank 1: with --nnodes 1 it is 0 (or raise --nnodes).",
        ),
        (
            ["--nnodes", "2"],
            "--nnodes 2 needs --coordinator host:port, the machine of --node_rank 0",
        ),
        (["--coordinator", "host0"], "--coordinator host0: write host:port"),
        (["--coordinator", "127.0.0.1:70000"], "a port from 1 to 65535"),
        (["--coordinator", "no-such-host.invalid:29500"], "(no-such-host.invalid)"),
        (["--grace_seconds", "-1"], "--grace_seconds -1.0: at least 0."),
        (["absent.py"], "absent.py: no such script in"),
        (["absent"], "For a module, write -m absent."),
        (["-m", "absent.module"], "-m absent.module: no such module, seen from"),
        (["--nproc", "x"], "argument --nproc: invalid int value: 'x'"),
    ],
)
def test_wrong_input_is_named_on_one_screen(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        run.main(["--nproc", "1", "--platform", "cpu", *arguments, __file__])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) < 8


def test_all_that_is_wrong_is_named_at_once(capsys):
    with pytest.raises(SystemExit):
        run.main(["--nproc", "0", "--nnodes", "2", "--platform", "cpu", "absent.py"])
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert [line.split()[0] for line in lines[-3:]] == [
        "--nproc",
        "--nnodes",
        "absent.py:",
    ]


def test_script_is_required(capsys):
    with pytest.raises(SystemExit):
        run.main(["--nproc", "1"])
    assert "the following arguments are required: script" in capsys.readouterr().err


def test_taken_port_is_an_error_with_a_remedy(capsys):
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        arguments = ["--nproc", "1", "--platform", "cpu", "--coordinator", address]
        with pytest.raises(SystemExit) as stop:
            run.main([*arguments, __file__])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert f"--coordinator {address}: this port cannot be used here" in err
    assert "Take another one, the same on every machine." in err


def options(**changes):
    values = {
        "nproc": 2,
        "nnodes": 1,
        "node_rank": 0,
        "coordinator": None,
        "platform": None,
        "grace_seconds": 1.0,
        "is_module": False,
        "target": "script.py",
        "arguments": [],
    }
    return run.Options(**(values | changes))


def test_ranks_count_through_the_machines():
    commands = run.create_commands(
        options(nnodes=3, node_rank=2, platform="cpu"), {}, "host0:29500"
    )
    assert [command.rank for command in commands] == [4, 5]
    environment = commands[1].environment
    assert environment["SBP_COORDINATOR"] == "host0:29500"
    assert environment["SBP_NUM_PROCESSES"] == "6"
    assert environment["SBP_PROCESS_ID"] == "5"
    assert environment["JAX_NUM_CPU_DEVICES"] == "1"


def test_each_rank_gets_one_of_the_visible_gpus():
    environ = {"CUDA_VISIBLE_DEVICES": "3,5"}
    commands = run.create_commands(options(), environ, "host0:29500")
    gpus = [command.environment["CUDA_VISIBLE_DEVICES"] for command in commands]
    assert gpus == ["3", "5"]
    assert "JAX_PLATFORMS" not in commands[0].environment


def test_platform_gpu_overrules_the_environment():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}
    commands = run.create_commands(options(platform="gpu"), environ, "host0:29500")
    assert commands[0].environment["JAX_PLATFORMS"] == "cuda,cpu"


def test_too_few_gpus_is_an_error_with_a_remedy():
    environ = {"CUDA_VISIBLE_DEVICES": "3,5"}
    problems = run.find_problems(options(nproc=4, target=__file__), environ)
    assert problems == [
        "--nproc 4: one GPU each, but this machine shows 2"
        " (CUDA_VISIBLE_DEVICES=3,5). Lower --nproc, or add --platform cpu."
    ]
