"""Asks a trained model: masked tokens, classes of texts, words or images.

    python -m launch.predict --workdir=runs/bert --text="The cat [MASK] on the mat."
    python -m launch.predict --workdir=runs/packages --inputs snippets.jsonl
    python -m launch.predict --workdir=runs/vit --inputs photos/ --output=found.jsonl

The workdir is that of a run, or what ``launch.convert --to=sbp`` has made. What it is
asked follows from its model. Each input gives one line of JSON, in the order given.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from launch import (
    command_line,
    predict_images,
    predict_texts,
    predictors,
    workdir,
)
from launch.predictors import AbstractPredictor, Item
from launch.trained import Trained, open_trained

Read = Callable[[Sequence[str], Sequence[str]], Iterator[Item]]
Open = Callable[[Trained, int], AbstractPredictor]

TEXT_MODELS: Mapping[str, tuple[Read, Open]] = {
    "bert": (predict_texts.read_texts, predict_texts.fill_masks),
    "bert_classifier": (predict_texts.read_texts, predict_texts.classify_texts),
    "bert_tagger": (predict_texts.read_words, predict_texts.tag_words),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a command line says.

    Attributes:
        workdir: Of the model.
        inputs: Files, or folders of images.
        text: Texts themselves.
        output: File to write; None for the standard output.
        global_batch_size: Inputs at once, which changes nothing but speed.
        top_k: Tokens or classes to name, best first.
        skip_broken: Leave out images that cannot be read rather than fail.
        step: Which checkpoint; None for the newest.
        data_parallel_size: Replicas of the model, each with a part of a batch.
        tensor_parallel_size: Devices of each replica.
    """

    workdir: str
    inputs: Sequence[str] = ()
    text: Sequence[str] = ()
    output: str | None = None
    global_batch_size: int = 32
    top_k: int = 5
    skip_broken: bool = False
    step: int | None = None
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    options = parse(arguments)
    return command_line.exit_code(lambda: run(options))


def parse(arguments: Sequence[str]) -> Options:
    """Returns what the command line says; argparse ends the program if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.predict",
        description="Asks a trained model; writes a line of JSON for each input.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    command_line.add_trained(parser)
    add("--inputs", nargs="+", default=[], help="files, or folders of images")
    add("--text", action="append", default=[], help="a text; may be repeated")
    add("--output", help="file to write; standard output if left out")
    add(
        "--global_batch_size", type=int, default=32, help="inputs at once (default: 32)"
    )
    add(
        "--top_k",
        type=int,
        default=5,
        help="tokens or classes to name, at most (default: 5)",
    )
    add("--skip_broken", action="store_true", help="leave out broken images")
    options = Options(**vars(parser.parse_args(arguments)))
    if not options.inputs and not options.text:
        parser.error("there is nothing to predict. Name --inputs or give a --text.")
    for name in ("global_batch_size", "top_k"):
        size = dataclasses.asdict(options)[name]
        if size < 1:
            parser.error(f"--{name}={size} must be at least 1.")
    return options


def run(options: Options) -> None:
    """Predicts as the options say.

    Raises:
        CheckpointError: If the workdir holds no model.
        OSError: If files are missing, or the output cannot be written.
        ValueError: If the model has nothing to say, or an input cannot be used.
    """
    workdir.check_output(options.output)
    trained = open_trained(
        options.workdir,
        step=options.step,
        data_parallel_size=options.data_parallel_size,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    reader: predict_images.ImageReader | None = None
    if trained.config.model_name == "vit":
        reader = _open_images(options)
        items = reader.read()
        predictor: AbstractPredictor = predict_images.classify_images(
            trained, options.top_k
        )
    else:
        read, open_predictor = _text_model(trained.config.model_name, options)
        items = read(options.inputs, options.text)
        predictor = open_predictor(trained, options.top_k)
    records = predictors.predict(
        trained, predictor, items, global_batch_size=options.global_batch_size
    )
    num = 0
    with _open_output(options.output) as file:
        for record in records:
            print(json.dumps(record, ensure_ascii=False), file=file, flush=True)
            num += 1
        if num == 0:
            raise ValueError(
                f"--inputs={' '.join(options.inputs)} holds nothing to predict, only"
                " blank lines or broken files. Name other files."
            )
    skipped = f", {reader.num_broken:,} broken files skipped" if reader else ""
    name, step = trained.config.model_name, trained.step
    print(f"{num:,} predictions of {name} at step {step}{skipped}", file=sys.stderr)


def _open_images(options: Options) -> predict_images.ImageReader:
    if options.text:
        raise ValueError(
            f"--text={options.text[0]!r} is of no use to a vit, which looks at images."
            " Name them in --inputs."
        )
    paths = predict_images.find_images(options.inputs)
    return predict_images.ImageReader(paths, options.skip_broken)


def _text_model(name: str, options: Options) -> tuple[Read, Open]:
    if options.skip_broken:
        raise ValueError(
            f"--skip_broken is about images, but the model is a {name}. Leave it out."
        )
    if name not in TEXT_MODELS:
        raise ValueError(
            f"'{options.workdir}' holds a {name}, which has no classes and fills in no"
            " masks. It continues texts: use python -m launch.generate."
        )
    return TEXT_MODELS[name]


@contextlib.contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with workdir.open_whole(pathlib.Path(path)) as file:
        yield file


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
