"""Runs one rank's script, as ``python script.py`` or ``python -m module`` would.

The difference is at the end: a script that fails leaves at once. By itself it would
stop in JAX's exit handler for minutes, waiting for ranks that wait for it. Imports
nothing outside the standard library, since it stands before every script.
"""

import os
import pathlib
import runpy
import sys
import types


def main(kind: str, target: str, arguments: list[str]) -> int:
    """Runs a script or a module with these arguments; returns its exit code.

    Args:
        kind: ``script`` or ``module``.
        target: Path of the script, or name of the module.
        arguments: The rest of its command line.
    """
    sys.argv = [target, *arguments]
    _set_path(os.getcwd() if kind == "module" else os.path.dirname(target))
    try:
        if kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as stop:
        return _exit_code(stop.code)
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT; as many stack traces as ranks would help nobody
    except BaseException as error:
        error.__traceback__ = _of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _set_path(first: str) -> None:
    """Puts ``first`` where Python put the directory of this file, and adds the root.

    The root lets a script import what the launcher could, wherever it lies itself.
    """
    sys.path[0] = os.path.abspath(first)
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.append(root)


def _exit_code(code: object) -> int:
    """Returns what the argument of `sys.exit` means: a text is printed, and a 1."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _of_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Drops the frames of this file and of runpy from the top of a stack trace."""
    ours = (__file__, runpy.run_path.__code__.co_filename)
    start = trace
    while start is not None and start.tb_frame.f_code.co_filename in ours:
        start = start.tb_next
    return start or trace


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2], sys.argv[3:])
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
