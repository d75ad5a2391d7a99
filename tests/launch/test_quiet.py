import asyncio
import logging
import sys
import types

from launch import quiet


def make_record(path, error=None):
    info = (type(error), error, None) if error else None
    return logging.LogRecord("x", logging.ERROR, path, 1, "text", None, info)


def test_only_what_orbax_logs_is_dropped():
    quiet.silence_orbax()
    logger = logging.getLogger("absl")
    assert not logger.filter(make_record(f"{quiet.ORBAX_DIRECTORY}/x.py"))
    assert logger.filter(make_record("/other/x.py"))


def test_only_futures_of_storage_are_dropped():
    quiet.silence_orbax()
    logger = logging.getLogger("asyncio")
    failed_read = ValueError("NOT_FOUND: ... [tensorstore_spec='{}']")
    assert not logger.filter(make_record("base_events.py", failed_read))
    assert logger.filter(make_record("base_events.py", ValueError("other")))
    assert logger.filter(make_record("base_events.py"))


def test_other_unraisable_errors_reach_the_hook_that_was_there(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    quiet.silence_orbax()
    quiet.silence_orbax()  # twice is once

    def report(error, source=None):
        sys.unraisablehook(types.SimpleNamespace(exc_value=error, object=source))

    report(RuntimeError("Event loop is closed"))
    assert seen == []
    report(RuntimeError("other"))
    other = asyncio.sleep(0)
    report(ValueError("text"), other)
    other.close()
    assert [str(each.exc_value) for each in seen] == ["other", "text"]
