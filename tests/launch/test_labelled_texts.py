"""Files of labelled texts and words: their forms, and what is wrong with them."""

import gzip

import pytest

from launch.data import labelled_texts

FORMS = {
    "a.csv": 'text,label\n"cat, ""dog""",x\n\ntree,y\n',
    "a.tsv": 'id\tlabel\ttext\n1\tx\tcat, "dog"\n2\ty\ttree\n'.replace(
        '"dog"', '""dog""'
    ).replace('cat, ""dog""', '"cat, ""dog"""'),
    "a.jsonl": '{"text": "cat, \\"dog\\"", "label": "x"}\n{"text":"tree","label":"y"}',
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_texts_come_in_tables_and_lines_of_json(tmp_path, name, suffix):
    path = tmp_path / (name + suffix)
    opener = gzip.open if suffix else open
    with opener(path, "wt") as file:
        file.write(FORMS[name])

    found = list(
        labelled_texts.open_classified([str(path)], tmp_path, "data.files").examples()
    )

    assert [(each.texts, each.labels) for each in found] == [
        (('cat, "dog"',), ("x",)),
        (("tree",), ("y",)),
    ]
    assert all(each.place.startswith(f"{path}:") for each in found)


def test_words_come_in_columns(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("EU NNP I-ORG\nrejects VBZ O\n\n\nPeter\tNNP\tB-PER\n")

    found = list(
        labelled_texts.open_tagged([str(path)], tmp_path, "data.files").examples()
    )

    assert [(each.place, each.texts, each.labels) for each in found] == [
        (f"{path}:1", ("EU", "rejects"), ("I-ORG", "O")),
        (f"{path}:5", ("Peter",), ("B-PER",)),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text;label\ncat;a\n", "a.csv:1: the header names the columns text;"),
        ("a.csv", "text,label\ncat, dog,a\n", "a.csv:2: the row has not the 2 fields"),
        ("a.csv", "text,label\ncat\n", "a.csv:2: the row has not the 2 fields of the"),
        ("a.jsonl", '{"text"}', "a.jsonl:1: not JSON: "),
        ("a.jsonl", "\n", "a.jsonl' holds no sample. Fill it, or leave it out."),
        ("a.md", "cat", "data.files names '{path}', which is of an unknown kind."),
    ],
)
def test_file_of_texts_that_cannot_be_read_is_an_error(
    tmp_path, name, content, message
):
    path = tmp_path / name
    path.write_text(content)

    def read():
        texts = labelled_texts.open_classified([str(path)], tmp_path, "data.files")
        return list(texts.examples())

    with pytest.raises(ValueError, match=name) as error:
        read()

    assert message.format(path=path) in str(error.value)


def test_line_of_one_word_without_its_label_is_an_error(tmp_path):
    (tmp_path / "a.conll").write_text("EU ORG\nrejects\n")
    texts = labelled_texts.open_tagged(
        [str(tmp_path / "a.conll")], tmp_path, "data.files"
    )

    with pytest.raises(ValueError, match=r"a.conll:2: the line holds 'rejects' alone"):
        list(texts.examples())
