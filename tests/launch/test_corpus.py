import gzip
import json
import sys

import pytest

from launch.data import corpus, python_docs, text_files

STORY = "It rains. We stay.\n\nThe sun\nshines. We go.\n"
STORY_DOCUMENTS = [["It rains.", "We stay."], ["The sun shines.", "We go."]]


def documents(tmp_path, *names):
    files = [str(tmp_path / name) for name in names]
    return list(corpus.open_corpus(files, tmp_path / "cache").documents())


def write(tmp_path, name, content):
    path = tmp_path / name
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def json_lines(*texts):
    return "\n".join(json.dumps({"id": 1, "text": text}) for text in texts)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", STORY),
        ("a", STORY.replace("\n\n", "\n \t\n\n")),
        ("a.txt", STORY.replace("\n", "\r\n")),
        ("a.txt", "\ufeff" + STORY),
        ("a.txt.gz", STORY),
        ("a.jsonl", json_lines(*STORY.split("\n\n"))),
        ("a.json", json_lines(*STORY.split("\n\n")) + "\n\n"),
        ("a.ndjson.gz", json_lines(*STORY.split("\n\n"))),
    ],
    ids=["text", "spaces", "crlf", "bom", "gzip", "jsonl", "blank-lines", "ndjson.gz"],
)
def test_each_format_gives_documents_of_sentences(tmp_path, name, content):
    write(tmp_path, name, content)

    assert documents(tmp_path, name) == STORY_DOCUMENTS


def test_the_end_of_a_file_ends_a_document(tmp_path):
    write(tmp_path, "a.txt", "One.")
    write(tmp_path, "b.txt", "Two.")

    assert documents(tmp_path, "b.txt", "a.txt") == [["Two."], ["One."]]


def test_a_pattern_names_its_files_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        write(tmp_path, name, f"{name}!")

    assert documents(tmp_path, "*.txt") == [["a.txt!"], ["b.txt!"]]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        ("no capital. follows", ["no capital. follows"]),
        ("a line of its own.\nfollows", ["a line of its own.", "follows"]),
        ("Dr. Who met J. Doe, i.e. Jo.", ["Dr. Who met J. Doe, i.e. Jo."]),
        ("1. The first. 2. The next.", ["1. The first.", "2. The next."]),
        ('He said "No." (She left.) Why?', ['He said "No."', "(She left.)", "Why?"]),
        ("Version 3.11 is it. 12 more", ["Version 3.11 is it.", "12 more"]),
        ("Er kam. Ärger gab es.", ["Er kam.", "Ärger gab es."]),
        ("今天下雨。我们走吧！好", ["今天下雨。", "我们走吧！", "好"]),
        ("Wait... What? " + "." * 20_000, ["Wait...", "What?", "." * 20_000]),
        ("", []),
        (" \n ", []),
    ],
)
def test_sentences_end_where_a_reader_says(text, sentences):
    assert corpus.split_sentences(text) == sentences


def test_text_without_sentences_is_cut_into_pieces():
    pieces = corpus.split_sentences("word " * 250)

    assert [len(piece.split()) for piece in pieces] == [100, 100, 50]


def test_long_documents_are_cut(tmp_path):
    write(tmp_path, "a.txt", "Yes. " * 2500)

    assert [len(d) for d in documents(tmp_path, "a.txt")] == [1000, 1000, 500]


def test_fingerprint_is_that_of_the_content(tmp_path):
    write(tmp_path, "a.txt", STORY)
    write(tmp_path, "b.txt", STORY)
    write(tmp_path, "c.txt", STORY + "!")
    one, same, other = (
        corpus.open_corpus([str(tmp_path / name)], tmp_path).fingerprint
        for name in ("a.txt", "b.txt", "c.txt")
    )

    assert one == same
    assert one != other


def test_large_files_are_hashed_once_unless_they_change(tmp_path, monkeypatch):
    path = write(tmp_path, "a.txt", STORY)
    small = corpus.open_corpus([str(path)], tmp_path / "cache").fingerprint
    monkeypatch.setattr(text_files, "LARGE_FILE", 0)
    hashed = []
    real_hash = text_files._hash
    monkeypatch.setattr(text_files, "_hash", lambda p: hashed.append(p) or real_hash(p))

    one, again = (corpus.open_corpus([str(path)], tmp_path / "cache") for _ in "ab")
    path.write_text(STORY.replace("rains", "pours"))
    changed = corpus.open_corpus([str(path)], tmp_path / "cache")

    assert one.fingerprint == again.fingerprint == small != changed.fingerprint
    assert len(hashed) == 2


def test_all_missing_files_are_named(tmp_path):
    write(tmp_path, "there.txt", STORY)

    with pytest.raises(FileNotFoundError) as error:
        documents(tmp_path, "there.txt", "gone.txt", "none/*.txt")

    assert "names 2 of 3 files that do not exist" in str(error.value)
    assert f"'{tmp_path}/gone.txt', '{tmp_path}/none/*.txt'" in str(error.value)


def test_all_empty_files_are_named(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()

    with pytest.raises(ValueError, match=r"empty files: '.*/a.txt', '.*/b.txt'. Remo"):
        documents(tmp_path, "a.txt", "b.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_file_of_white_space_holds_no_text(tmp_path, name):
    write(tmp_path, name, " \n\n")

    with pytest.raises(ValueError, match=rf"'.*/{name}' holds no text. Remove it"):
        documents(tmp_path, name)


def test_folder_is_refused_with_a_pattern_to_use(tmp_path):
    with pytest.raises(ValueError, match=r"names folders.*for example '.*/\*\.txt'"):
        documents(tmp_path, "")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"fine\nab\0c", "at byte offset 7 there is 0x00"),
        (b"fine\nb\xffc\0", "at byte offset 8 there is 0x00"),
        (b"fine\n" * 1000 + b"caf\xe9", "at byte offset 5003 there is 0xe9"),
        ("text".encode("utf-16"), "at byte offset 3 there is 0x00"),
        (b"\x89PNG\r\n", "at byte offset 0 there is 0x89"),
    ],
    ids=["nul", "nul-first", "latin-1", "utf-16", "png"],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz"])
def test_binary_file_names_the_byte(tmp_path, name, content, place):
    if "json" in name:
        content = content.replace(b"fine\n", b"    \n")
    write(tmp_path, name, content)

    with pytest.raises(ValueError, match=rf"'.*/{name}' is not text: {place}.*UTF-8"):
        documents(tmp_path, name)


def test_damaged_gzip_says_how_far_it_could_be_read(tmp_path):
    path = write(tmp_path, "a.txt.gz", STORY * 1000)
    path.write_bytes(path.read_bytes()[:-20])

    with pytest.raises(ValueError, match=r"a.txt.gz' cannot be read after byte \d+ of"):
        documents(tmp_path, "a.txt.gz")


def test_text_named_gz_is_no_gzip(tmp_path):
    (tmp_path / "a.gz").write_text(STORY)

    with pytest.raises(ValueError, match="after byte 0 .*: Not a gzipped file"):
        documents(tmp_path, "a.gz")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "a"}', r"a.jsonl:2: there is no string .* 'text', only \['txt'\]"),
        ('{"text": 1}', r"a.jsonl:2: there is no string under the key 'text', only"),
        ("[1]", r"a.jsonl:2: there is no string under the key 'text', only list"),
        ("{'text'}", r"a.jsonl:2: not JSON: Expecting property name"),
    ],
)
def test_bad_json_names_file_and_line(tmp_path, line, message):
    write(tmp_path, "a.jsonl", json_lines("Fine.") + "\n" + line)

    with pytest.raises(ValueError, match=message) as error:
        documents(tmp_path, "a.jsonl")

    assert '{"text": "One document."}' in str(error.value)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    return corpus.open_corpus((), tmp_path_factory.mktemp("cache"))


def test_embedded_corpus_is_prose_of_the_installation(embedded):
    documents = list(embedded.documents())
    sentences = [sentence for document in documents for sentence in document]
    words = [word for sentence in sentences for word in sentence.split()]

    assert sum(len(document) > 1 for document in documents) > 400
    assert len(words) > 200_000
    assert not any(">>>" in sentence for sentence in sentences)
    assert sum("`" in word for word in words) < 0.001 * len(words)
    assert sum(word.strip("(),.'\"").isalpha() for word in words) > 0.85 * len(words)


def test_embedded_corpus_is_kept(embedded):
    again = corpus.open_corpus((), embedded.files[0].parent)

    assert again == embedded


def test_standard_library_is_not_imported(embedded):
    assert len(python_docs.source_files()) > 400
    assert not {"antigravity", "this", "turtle"} & set(sys.modules)


@pytest.mark.parametrize(
    ("docstring", "paragraphs"),
    [
        (
            "Return x.\n\nWith :func:`~a.b` and ``c`` it is\n*never* `None`_.",
            ["With a.b and c it is never None."],
        ),
        (
            "The name of the thing\n=====================\n\nx = 1; y = f(x)",
            ["The name of the thing."],
        ),
        (
            "It does two things well:\n\n- the first of these things\n"
            "- the second one\n  goes on here.\n",
            [
                "It does two things well.",
                "the first of these things.",
                "the second one goes on here.",
            ],
        ),
        (
            "This is how to use it.\n>>> f(1)\nnow this is output of it\n\nAnd then"
            " there is more!",
            ["This is how to use it.", "And then there is more!"],
        ),
        (
            "An example of that::\n\n    some code that reads like prose\n\n"
            "    more code that reads so\n\nBack to the text again.",
            ["An example of that.", "Back to the text again."],
        ),
        (
            ":param name: the name of the file\n:returns: nothing at all really",
            ["the name of the file.", "nothing at all really."],
        ),
        ("+-----+-----+\n| one | two words in a table |\n+-----+-----+", []),
    ],
    ids=["markup", "heading", "list", "doctest", "code", "fields", "table"],
)
def test_docstrings_are_cleaned(docstring, paragraphs):
    assert python_docs.clean(docstring) == paragraphs
