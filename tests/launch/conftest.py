"""A disk that is full, as far as a process can tell."""

import contextlib
import resource
import signal

import pytest


@pytest.fixture
def file_size_limit():
    """A context in which no file of this process grows beyond a number of bytes.

    It needs no rights, unlike a file system that is full; writes fail in the same
    places, with another errno.
    """

    @contextlib.contextmanager
    def limit(num_bytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, previous)

    return limit
