"""What commands on trained models have in common."""

import subprocess
import sys

import pytest

from launch import command_line
from launch.checkpoint import CheckpointError


@pytest.mark.parametrize("kind", [CheckpointError, FileNotFoundError, ValueError])
def test_what_a_user_can_cause_is_a_message(kind, capsys):
    def work():
        raise kind("It is not there. Look elsewhere.")

    assert command_line.exit_code(work) == 1
    assert capsys.readouterr().err == "error: It is not there. Look elsewhere.\n"


def test_our_own_mistake_has_a_stack_trace():
    with pytest.raises(ZeroDivisionError):
        command_line.exit_code(lambda: 1 / 0)


def test_reader_that_has_enough_is_no_error():
    script = (
        "import sys; from launch import command_line\n"
        "def work():\n    for n in range(100_000): print(n, flush=True)\n"
        "sys.exit(command_line.exit_code(work))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
