"""Each tutorial runs, and its notebook holds the same cells.

The notebooks are made from the scripts, without outputs, by

    jupytext --update --to ipynb docs/tutorials/*.py
"""

import os
import pathlib
import subprocess
import sys

import jupytext
import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
NOISE = ROOT / "docs" / "tutorials" / "05_noise.py"
TIME_LIMIT = 300  # seconds, for one tutorial on a loaded machine

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def run_python(*arguments):
    """Runs Python in the root, as a reader would, and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells_of(path):
    """Returns the kinds and sources of the cells of a script or a notebook."""
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def test_there_are_tutorials():
    assert len(SCRIPTS) >= 3


@each_script
def test_tutorial_runs_and_prints(script):
    assert run_python(script).strip()


@each_script
def test_notebook_has_the_cells_of_the_script_and_no_outputs(script):
    notebook = script.with_suffix(".ipynb")
    assert cells_of(notebook) == cells_of(script), "run jupytext, as said above"
    code = [c for c in jupytext.read(notebook).cells if c.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize(
    "launcher",
    [(), ("-m", "launch.run", "--nproc", "4", "--platform", "cpu")],
    ids=["one_process", "four_processes"],
)
def test_every_rank_of_the_noise_says_what_it_holds(launcher):
    lines = run_python(*launcher, NOISE).splitlines()
    if launcher:
        rank_of = {int(line[1]): line[4:] for line in lines if "] rank" in line}
        described = [rank_of[rank] for rank in range(4)]
    else:
        described = [line for line in lines if line.startswith("rank")]
    assert described == [
        f"rank {rank}: global shape (16, 8), sbp (sbp.split(0), sbp.split(1)),"
        " placement sbp.placement('cpu', ranks=[[0, 1], [2, 3]],"
        " axis_names=('data', 'tensor')), local shape (8, 4)"
        for rank in range(4)
    ]
    num_processes = 4 if launcher else 1
    assert sum("largest difference: 0.0" in line for line in lines) == num_processes
