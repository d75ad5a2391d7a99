"""docs/pipeline_schedules.md: its examples run, its pictures are of today."""

import doctest
import itertools
import pathlib
import re
import xml.etree.ElementTree

import pytest

from sbp.pipeline import builders, picture

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "pipeline_schedules.md"


def words_of(path):
    texts = xml.etree.ElementTree.parse(path).getroot().itertext()
    return " ".join(itertools.chain.from_iterable(text.split() for text in texts))


def test_examples_of_the_page_give_what_it_says():
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted == 16
    assert results.failed == 0


@pytest.mark.parametrize("name", builders.SCHEDULES)
def test_picture_on_the_page_is_what_is_drawn_now(name, tmp_path):
    stored = PAGE.parent / "images" / f"schedule_{name}.svg"
    assert f"(images/{stored.name})" in PAGE.read_text()
    plan = builders.build(name, 4, 8, 2 if name == "interleaved_1f1b" else 1)
    picture.save(picture.to_figure(plan), tmp_path / "now.svg")
    assert words_of(stored) == words_of(tmp_path / "now.svg")


def test_page_shows_no_other_picture():
    shown = re.findall(r"\(images/schedule_(\w+)\.svg\)", PAGE.read_text())
    assert shown == list(builders.SCHEDULES)
