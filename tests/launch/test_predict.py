"""Answers of models in workdirs: what the models say, each input once, in order."""

import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import models as token_models

from launch import convert, predict, workdir
from launch.data import tokenizer
from models import MODELS
from tests.launch import trained_runs
from tests.models import cases

WORDS = (
    "the cat dog tree house sees likes has a red green old small big ##s ##es".split()
)
TEXT_SIZES = {**trained_runs.SIZES, "vocab_size": 24, "max_len": 32}
NAMES = ("none", "noun", "verb", "article", "other", "name", "sign")
TEXTS = [
    "the cat sees the red house",
    "a dog",
    "cats likes the old old old tree has a small big green dog",
    "unseen words",
    "house",
]


def word_tokenizer():
    ids = {token: i for i, token in enumerate([*tokenizer.SPECIAL_TOKENS, *WORDS])}
    model = token_models.WordPiece(ids, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(list(tokenizer.SPECIAL_TOKENS))
    return made


def write_images(folder):
    """Five images of other sizes than the model's, in folders."""
    r = np.random.default_rng(0)
    for number in range(5):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(r.integers(0, 256, (12, 9 + number), np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A workdir of each kind of model, with its parameters."""
    found = {}
    text = {"data": {"seq_length": 32}, "tokenizer": word_tokenizer()}
    head = {**text, "data": {"seq_length": 32, "classes": NAMES[:6]}}
    kinds = {
        "bert": ({"name": "bert", **TEXT_SIZES}, text),
        "bert_classifier": (
            {"name": "bert_classifier", **TEXT_SIZES, "num_classes": 7},
            head,
        ),
        "bert_tagger": ({"name": "bert_tagger", **TEXT_SIZES, "num_classes": 7}, head),
        "vit": (
            {
                "name": "vit",
                **trained_runs.SIZES,
                "image_size": 8,
                "patch_size": 4,
                "num_channels": 1,
                "num_classes": 7,
            },
            {"data": {"classes": NAMES}},
        ),
    }
    for name, (model, options) in kinds.items():
        directory = tmp_path_factory.mktemp(name)
        state = trained_runs.make(directory, model=model, **options)
        found[name] = directory, jax.device_get(state.params), model
    return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Five inputs of each kind."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "texts.txt").write_text("\n\n".join(TEXTS))
    masked = [{"text": text.replace(text.split()[-1], "[MASK]")} for text in TEXTS]
    masked[1]["text"] = "[MASK] dog [MASK]"
    (folder / "masked.jsonl").write_text("\n".join(map(json.dumps, masked)))
    return {
        "bert": folder / "masked.jsonl",
        "bert_classifier": folder / "texts.txt",
        "bert_tagger": folder / "texts.txt",
        "vit": write_images(folder / "images"),
    }


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Runs the command line and returns the records."""
    output = tmp_path_factory.mktemp("records") / "records.jsonl"

    def ask(directory, *arguments):
        command = [f"--workdir={directory}", f"--output={output}", *map(str, arguments)]
        assert predict.main(command) == 0
        return [json.loads(line) for line in output.read_text().splitlines()]

    return ask


@pytest.fixture(scope="module")
def answers(ask, runs, inputs):
    """Returns what a model says of its inputs, all at once on one device."""

    @functools.cache
    def answers(name):
        return ask(runs[name][0], "--inputs", inputs[name], "--top_k=7")

    return answers


def model_of(run):
    """The plain module with the weights of a run."""
    _, params, fields = run
    fields = dict(fields)
    name = fields.pop("name")
    config = MODELS[name].config(**fields)
    case = cases.Case(
        name=name, config=config, model=None, params=params, batch={}, golden=None
    )
    return cases.module_of(case, params)


def encode(text):
    ids = word_tokenizer().encode(f"[CLS] {text} [SEP]", add_special_tokens=False).ids
    return {
        "tokens": jnp.array([ids]),
        "segments": jnp.zeros((1, len(ids)), int),
        "is_token": jnp.ones((1, len(ids)), bool),
    }


def logits_of(module, batch):
    return jax.jit(lambda batch: module.logits(module.encode(batch)))(batch)


def softmax(scores):
    return np.asarray(jax.nn.softmax(scores))


NEAR = dict(rel=1e-4, abs=1e-6)


def test_masks_are_filled_as_the_model_says(runs, answers):
    records = answers("bert")

    module = model_of(runs["bert"])
    assert [len(record["masks"]) for record in records] == [1, 2, 1, 1, 1]
    batch = encode("[MASK] dog [MASK]")
    batch["positions"] = jnp.array([[1, 3]])
    logits = jax.jit(lambda batch: module.logits(module.encode(batch), batch)[0])
    scores = softmax(logits(batch)[0, :, :24])
    names = [*tokenizer.SPECIAL_TOKENS, *WORDS]
    for row, mask in zip(scores, records[1]["masks"], strict=True):
        best = np.argsort(-row[: len(names)])[:7]  # three more have no name
        assert [each["token"] for each in mask] == [names[index] for index in best]
        assert [each["probability"] for each in mask] == pytest.approx(
            row[best].tolist(), **NEAR
        )
    first, last = (mask[0]["token"] for mask in records[1]["masks"])
    assert records[1]["filled"].split()[0] == first
    assert records[1]["filled"].endswith(last.removeprefix("##"))


def test_texts_are_classified_as_the_model_says(runs, answers):
    records = answers("bert_classifier")

    module = model_of(runs["bert_classifier"])
    assert [record["text"] for record in records] == TEXTS
    scores = softmax(logits_of(module, encode(TEXTS[2]))[0])
    names = [*NAMES[:6], "LABEL_6"]  # the run has named six of seven
    best = records[2]["best"]
    assert [each["label"] for each in best] == [
        names[index] for index in np.argsort(-scores)
    ]
    assert best[0]["probability"] == pytest.approx(scores.max(), **NEAR)
    assert records[2]["label"] == best[0]["label"]


def test_words_are_tagged_as_the_model_says(runs, answers):
    records = answers("bert_tagger")

    module = model_of(runs["bert_tagger"])
    assert [record["words"] for record in records] == [text.split() for text in TEXTS]
    scores = softmax(logits_of(module, encode(TEXTS[2]))[0])
    firsts = [1, *range(3, 15)]  # 'cats' has two pieces
    assert len(set(records[2]["labels"])) > 1
    names = [*NAMES[:6], "LABEL_6"]
    assert records[2]["labels"] == [names[i] for i in scores[firsts].argmax(-1)]
    assert records[2]["probabilities"] == pytest.approx(
        scores[firsts].max(-1).tolist(), **NEAR
    )


def test_images_are_classified_as_in_evaluation(runs, inputs, answers):
    records = answers("vit")

    names = ["a/0.png", "a/2.png", "a/4.png", "b/1.png", "b/3.png"]
    assert [r["file"] for r in records] == [str(inputs["vit"] / n) for n in names]
    assert all(len(record["best"]) == 7 for record in records)
    module = model_of(runs["vit"])
    with Image.open(records[3]["file"]) as image:
        square = image.resize((8, 8), Image.Resampling.BICUBIC, box=(0, 1, 10, 11))
    pixels = (np.asarray(square, np.float32) / 255 - 0.5) / 0.5
    scores = softmax(logits_of(module, {"images": pixels[None, ..., None]}))
    assert records[3]["label"] == NAMES[scores.argmax()]
    assert records[3]["probability"] == pytest.approx(scores.max(), rel=1e-3)


SPLIT = ("--data_parallel_size=2", "--tensor_parallel_size=2")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("bert", ()), *((name, SPLIT) for name in [*predict.TEXT_MODELS, "vit"])],
)
def test_batch_size_and_layout_change_nothing(name, layout, runs, inputs, ask, answers):
    given = ["--inputs", inputs[name], "--top_k=7", "--global_batch_size=3", *layout]

    found = ask(runs[name][0], *given)  # the last batch is short

    assert len(found) == 5
    assert_near(found, answers(name))


def assert_near(found, expected):
    """Asserts that records are equal but for rounding."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, **NEAR)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_near(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)
    else:
        assert found == expected


def test_texts_of_all_forms_are_read_in_the_order_given(runs, ask, tmp_path):
    (tmp_path / "b.tsv").write_text("label\ttext\n1\tthe cat\n2\ta dog\n")
    (tmp_path / "a.jsonl").write_text('{"text": "house", "text_pair": "tree"}\n')

    records = ask(
        runs["bert_classifier"][0],
        *("--inputs", tmp_path / "b.tsv", tmp_path / "a.jsonl"),
        *("--text=red", "--text", "green"),
    )

    assert [record["text"] for record in records] == [
        *("the cat", "a dog", "house", "red", "green")
    ]
    assert records[2]["text_pair"] == "tree"
    scores = {record["probability"] for record in records}
    assert len(scores) == 5


def test_what_is_too_long_is_cut_and_says_so(runs, ask, tmp_path):
    long = " ".join(["cat"] * 40)
    [record] = ask(runs["bert_classifier"][0], f"--text={long}")
    assert record["is_cut"]

    (tmp_path / "a.jsonl").write_text(json.dumps({"words": long.split()}))
    [record] = ask(runs["bert_tagger"][0], "--inputs", tmp_path / "a.jsonl")
    assert [label is None for label in record["labels"]] == [False] * 30 + [True] * 10
    assert record["probabilities"][30:] == [None] * 10


def test_broken_images_are_left_out_and_counted_if_asked(runs, ask, tmp_path, capsys):
    folder = write_images(tmp_path / "images")
    (folder / "a" / "1.png").write_text("no image")
    (folder / ".hidden").write_text("")

    records = ask(runs["vit"][0], "--inputs", folder, "--skip_broken")

    assert len(records) == 5
    assert "5 predictions of vit at step 7, 1 broken files" in capsys.readouterr().err


def test_records_go_to_the_standard_output(runs, capsys):
    arguments = [f"--workdir={runs['bert'][0]}", "--text=a [MASK]"]

    assert predict.main(arguments) == 0

    found = capsys.readouterr()
    assert json.loads(found.out)["text"] == "a [MASK]"
    assert found.err == "1 predictions of bert at step 7\n"


def test_reader_that_has_enough_is_no_error(runs, monkeypatch, tmp_path, capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return file.fileno()

    with (tmp_path / "closed").open("w") as file:
        monkeypatch.setattr("sys.stdout", Closed())
        code = predict.main([f"--workdir={runs['bert'][0]}", "--text=a [MASK]"])

    assert code == 0
    assert capsys.readouterr().err == ""


def test_published_checkpoint_answers_by_its_own_names(runs, tmp_path, ask):
    golden = cases.load("bert_classifier").golden
    labels = {str(i): f"class {i}" for i in range(7)}
    (tmp_path / "hf").mkdir()
    published = {**golden.config, "id2label": labels}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(published))
    word_tokenizer().save(str(tmp_path / "hf" / "tokenizer.json"))
    save_file(golden.weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    source, target = str(tmp_path / "hf"), str(tmp_path / "run")
    assert convert.main(["--from=hf", "--to=sbp", source, target]) == 0

    [record] = ask(target, "--text=the cat sees")

    case = cases.load("bert_classifier")
    module = cases.module_of(case, case.params)
    scores = softmax(logits_of(module, encode("the cat sees")))
    assert record["label"] == f"class {scores.argmax()}"
    assert record["probability"] == pytest.approx(scores.max(), **NEAR)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bert", ["--text=no mask"], "--text number 1: the text has no [MASK] to fill"),
        (
            "bert",
            [f"--text={'cat ' * 40}[MASK]"],
            "the text has 41 tokens, and a [MASK] stands beyond the 32 positions",
        ),
        ("bert", ["--text= "], "--text number 1: there is no text under 'text', but"),
        (
            "bert",
            ["--inputs=none.txt"],
            "--inputs names 1 of 1 files that do not exist",
        ),
        ("bert", ["--inputs={folder}"], "--inputs names folders: "),
        ("bert", ["--inputs={folder}/a.png"], "a.png', which is of an unknown kind"),
        ("bert", ["--text=[MASK]", "--skip_broken"], "--skip_broken is about images"),
        ("bert", ["--text=[MASK]", "--step=3"], "has no checkpoint of step 3"),
        ("vit", ["--text=cat"], "--text='cat' is of no use to a vit, which looks at"),
        ("vit", ["--inputs={folder}"], "a.png' cannot be read: cannot identify image"),
        ("vit", ["--inputs=none"], "--inputs names 1 of 1 files and folders that do"),
        ("vit", ["--inputs={empty}"], "holds no file. Name images, or folders of them"),
    ],
)
def test_what_cannot_be_predicted_is_an_error(
    name, arguments, message, runs, tmp_path, capsys
):
    (tmp_path / "a.png").write_text("no image")
    (tmp_path / "empty").mkdir()
    places = {"folder": tmp_path, "empty": tmp_path / "empty"}

    arguments = [argument.format(**places) for argument in arguments]
    code = predict.main([f"--workdir={runs[name][0]}", *arguments])

    assert code == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert message in found.err
    assert found.err.startswith("error: ")


def test_tokenizer_must_be_there_and_fit(runs, tmp_path, capsys):
    model = {"name": "bert", **TEXT_SIZES}
    trained_runs.make(tmp_path, model=model, data={"seq_length": 32})
    arguments = [f"--workdir={tmp_path}", "--text=[MASK]"]

    assert predict.main(arguments) == 1
    assert "has no tokenizer, without which texts are of no" in capsys.readouterr().err

    large = word_tokenizer()
    large.add_tokens([f"word{number}" for number in range(9)])
    (tmp_path / workdir.TOKENIZER_FILE).write_text(large.to_str())
    assert predict.main(arguments) == 1
    message = "has 30 tokens, more than model.vocab_size=24. Set model.vocab_size=30"
    assert message in capsys.readouterr().err
