"""The same conversions and errors with one device in each of several processes."""

import collections
import os
import pathlib
import subprocess
import sys

import sbp.distributed

SCRIPT = pathlib.Path(__file__).with_name("processes_script.py")
ROOT = SCRIPT.parents[2]


def test_conversions_and_errors_in_three_processes():
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in sbp.distributed.LAUNCH_VARIABLES
    }
    command = [sys.executable, "-m", "launch.run", "--nproc", "3", str(SCRIPT)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    passed = collections.Counter(
        line.split("passed: ")[1] for line in output.splitlines() if "passed: " in line
    )
    checks = [
        "one_placement",
        "two_placements",
        "creation",
        "errors",
        "different_calls",
    ]
    assert passed == dict.fromkeys(checks, 3), output
