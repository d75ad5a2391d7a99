"""The examples of the pages print what they show."""

import doctest
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_examples_of_page_print_what_they_show(path):
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)
    page = doctest.DocTestParser().get_doctest(
        "\n".join(blocks), globs={}, name=path.name, filename=None, lineno=0
    )

    assert doctest.DocTestRunner().run(page).failed == 0


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_of_page_lead_somewhere(path):
    text = path.read_text()
    targets = [part.split(")")[0] for part in text.split("](")[1:]]
    local = [t.split("#")[0] for t in targets if not t.startswith("http")]
    missing = [t for t in local if t and not (path.parent / t).exists()]

    assert not missing
