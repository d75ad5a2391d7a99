"""Keeps the stack traces of Orbax's threads off the screen.

What fails there is raised once, as one message, by the call that waits for it. Orbax
also logs each failure several times over, page by page, and asyncio adds the reads
that were given up with it.
"""

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator

GRACE_SECONDS = 0.2  # for reads of other threads that are given up but not over


def silence(logger_name: str, *, under: str) -> None:
    """Drops, for good, what files below the directory ``under`` log to a logger."""
    logger = logging.getLogger(logger_name)
    if not any(isinstance(entry, _SourceFilter) for entry in logger.filters):
        logger.addFilter(_SourceFilter(under))


@contextlib.contextmanager
def collect_failed_reads() -> Iterator[None]:
    """Discards the unfinished reads, if the block fails, without reports on each."""
    try:
        yield
    except Exception as error:
        _forget_frames(error)  # they hold the reads
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        logger = logging.getLogger("asyncio")
        logger.addFilter(_reject)
        try:
            gc.collect()
            time.sleep(GRACE_SECONDS)
        finally:
            logger.removeFilter(_reject)
            sys.unraisablehook = hook
        raise


def _forget_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an error and of all that led to it."""
    while error is not None:
        error.__traceback__ = None
        _forget_frames(error.__cause__)
        error = error.__context__


def _reject(record: logging.LogRecord) -> bool:
    del record
    return False


class _SourceFilter(logging.Filter):
    """Rejects the records that come from files below a directory."""

    def __init__(self, directory: str):
        super().__init__()
        self._directory = directory

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.pathname.startswith(self._directory)
