"""Keeps the stack traces of Orbax's threads off the screen.

What fails there is raised once, as one message, by the call that waits for it. Orbax
also logs each failure several times over, page by page, and every read or write that is
given up along with it leaves a trace of its own, at any later time.
"""

import logging
import sys
import types
from collections.abc import Callable

import orbax.checkpoint as ocp

ORBAX_DIRECTORY = ocp.__path__[0]


def silence_orbax() -> None:
    """Drops, from now on, what Orbax and the reads and writes it gave up report."""
    for name, accepts in {"absl": _is_not_orbax, "asyncio": _is_not_storage}.items():
        logger = logging.getLogger(name)
        if accepts not in logger.filters:
            logger.addFilter(accepts)
    if not isinstance(sys.unraisablehook, _UnraisableFilter):
        sys.unraisablehook = _UnraisableFilter(sys.unraisablehook)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return not record.pathname.startswith(ORBAX_DIRECTORY)


def _is_not_storage(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return "tensorstore_spec" not in str(error)


class _UnraisableFilter:
    """Drops what is left of reads and writes that were given up; passes on the rest."""

    def __init__(self, hook: Callable[["sys.UnraisableHookArgs"], object]):
        self._hook = hook

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        source = unraisable.object
        is_given_up = isinstance(source, types.CoroutineType) and (
            source.cr_code.co_filename.startswith(ORBAX_DIRECTORY)
        )
        # Tensorstore's threads report to an event loop that is no more.
        is_late = str(unraisable.exc_value) == "Event loop is closed"
        if not is_given_up and not is_late:
            self._hook(unraisable)
