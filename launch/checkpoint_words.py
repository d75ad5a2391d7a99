"""Says in words what stands in a directory of checkpoints, and why it failed."""

import os
import pathlib
import re


def shorten(paths: list[str]) -> str:
    """Returns the first of the paths, and how many there are besides.

    Example:
        >>> shorten(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def describe_absence(directory: pathlib.Path) -> str:
    """Returns what there is in place of a checkpoint, in a sentence."""
    if not directory.exists():
        return (
            f"There is no checkpoint directory '{directory}'. Start the run from the "
            "beginning, or name the directory of an earlier one."
        )
    if not directory.is_dir():
        return f"'{directory}' is a file, not a checkpoint directory."
    names = sorted(path.name for path in directory.iterdir())
    holds = shorten(names) if names else "nothing"
    return (
        f"'{directory}' holds no checkpoint, that is, no complete directory named for "
        f"its step, such as '100'; it holds {holds}."
    )


def reason(error: Exception) -> str:
    """Returns the cause in a few words: what the operating system said, if it did."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")[:200]
