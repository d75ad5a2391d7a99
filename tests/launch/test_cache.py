import concurrent.futures
import errno
import multiprocessing
import os
import pathlib
import time

import pytest

from launch.data import cache


def test_entry_is_built_once(tmp_path):
    built = []

    def build(path):
        built.append(path)
        path.write_text("content")

    paths = [cache.entry(tmp_path / "new" / "cache", "entry", build) for _ in "ab"]

    assert len(built) == 1
    assert paths == [tmp_path / "new" / "cache" / "entry"] * 2
    assert paths[0].read_text() == "content"


def test_entry_appears_as_a_whole(tmp_path):
    inodes = []

    def build(path):
        path.write_text("content")
        inodes.append(path.stat().st_ino)
        assert not (tmp_path / "entry").exists()

    # A file that is renamed has all of its content from the first moment.
    assert cache.entry(tmp_path, "entry", build).stat().st_ino == inodes[0]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(path):
        path.mkdir()
        (path / "half").write_text("written")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cache.entry(tmp_path, "entry", build)

    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_killed_process_leaves_no_entry_and_no_lock(tmp_path):
    process = multiprocessing.get_context("spawn").Process(
        target=cache.entry, args=(tmp_path, "entry", _write_and_die)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    assert not (tmp_path / "entry").exists()

    path = cache.entry(tmp_path, "entry", lambda path: path.write_text("whole"))

    assert path.read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "entry"]


def test_processes_that_want_the_same_entry_build_it_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(3, mp_context=spawn) as pool:
        contents = list(pool.map(_build_slowly, [tmp_path] * 3))

    assert len(set(contents)) == 1


def test_unwritable_cache_names_the_folder_and_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ValueError, match="cannot be written: Not a directory") as error:
        cache.entry(tmp_path / "file" / "cache", "entry", pathlib.Path.touch)

    assert str(tmp_path / "file" / "cache") in str(error.value)
    assert "Set data.cache_dir" in str(error.value)


def test_full_disk_is_an_error_that_says_so(tmp_path):
    def build(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        cache.entry(tmp_path, "entry", build)


def _write_and_die(path):
    path.write_text("half")
    os._exit(9)


def _build_slowly(directory):
    def build(path):
        time.sleep(0.2)
        path.write_text(str(os.getpid()))

    return cache.entry(directory, "entry", build).read_text()
