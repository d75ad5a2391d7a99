"""Continues texts with a trained GPT-2.

    python -m launch.generate --workdir=runs/gpt2_tiny --prompt="def main(" \
        --temperature=0.8 --top_k=40

The workdir is that of a run, or what ``launch.convert --to=sbp`` has made of a
published model. Without a temperature each token is the best one; ``--num_beams`` looks
for the best text instead. See docs/generation.md.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence

from launch import command_line, generation, stop_rules, workdir
from launch.generation import Continuation, GenerationConfig
from launch.stop_rules import StopRules
from launch.trained import Trained, open_trained
from models.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a command line says.

    Attributes:
        workdir: Folder of the run.
        step: Which checkpoint; None for the newest.
        prompts: Texts to continue.
        prompts_file: A file of more of them; None for none.
        output: File of JSON lines to write; None prints the texts.
        stop_strings: Each ends a text that contains it.
        stop_tokens: Each ends a text, besides the end of a text.
        config: How to continue.
        data_parallel_size: Replicas of the model.
        tensor_parallel_size: Devices of each replica.
    """

    workdir: str
    step: int | None
    prompts: tuple[str, ...]
    prompts_file: str | None
    output: str | None
    stop_strings: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    config: GenerationConfig
    data_parallel_size: int
    tensor_parallel_size: int


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    options = parse(arguments)
    return command_line.exit_code(lambda: run(options))


def parse(arguments: Sequence[str]) -> Options:
    """Returns what the command line says; argparse ends the program if it is wrong."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    if not values["prompts"] and values["prompts_file"] is None:
        parser.error("there is nothing to continue. Add --prompt=TEXT, or --prompts.")

    def take(config_type: type) -> dict:
        names = [field.name for field in dataclasses.fields(config_type)]
        return {name: values.pop(name) for name in names if name in values}

    sampling = SamplingConfig(**take(SamplingConfig))
    config = GenerationConfig(sampling=sampling, **take(GenerationConfig))
    for name in ("prompts", "stop_strings", "stop_tokens"):
        values[name] = tuple(values[name])
    return Options(config=config, **values)


def run(options: Options) -> None:
    """Continues the prompts; prints the texts or writes them to a file."""
    prompts = [*options.prompts]
    if options.prompts_file is not None:
        prompts += read_prompts(options.prompts_file)
    workdir.check_output(options.output)
    trained = open_trained(
        options.workdir,
        step=options.step,
        data_parallel_size=options.data_parallel_size,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    start = time.perf_counter()
    rules, found = continue_texts(trained, prompts, options)
    seconds = time.perf_counter() - start
    lines = [
        describe(trained, rules, prompt, sample, continuation)
        for prompt, texts in zip(prompts, found, strict=True)
        for sample, continuation in enumerate(texts)
    ]
    if options.output is not None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        workdir.write_whole(pathlib.Path(options.output), text)
    else:
        for line in lines:
            print(f"{line['prompt']}{line['text']}")
            if len(lines) > 1:
                print("-" * 8)
    num_tokens = sum(line["num_tokens"] for line in lines)
    print(
        f"step {trained.step}: {len(lines)} texts of {num_tokens:,} new tokens in"
        f" {seconds:.1f} s, compiling included",
        file=sys.stderr,
    )


def continue_texts(
    trained: Trained, prompts: Sequence[str], options: Options
) -> tuple[StopRules, list[list[Continuation]]]:
    """Returns what ends a text, and the continuations of each prompt.

    Raises:
        ValueError: If the model does not continue texts or has no tokenizer, or the
            options break rules.
    """
    generation.check_family(trained.config.model_name)
    tokenizer = trained.need_tokenizer()
    rules = stop_rules.of_tokenizer(
        tokenizer, options.stop_strings, options.stop_tokens
    )
    table_SV = rules.table(tokenizer, trained.config.model.padded_vocab_size)
    encodings = tokenizer.encode_batch(prompts, add_special_tokens=False)
    tokens = [encoding.ids for encoding in encodings]
    return rules, generation.build(trained, options.config, table_SV).generate(tokens)


def describe(
    trained: Trained,
    rules: StopRules,
    prompt: str,
    sample: int,
    continuation: Continuation,
) -> dict:
    """Returns a line of the output, as JSON has it."""
    line = {
        "prompt": prompt,
        "sample": sample,
        "text": rules.text_of(trained.need_tokenizer(), continuation.tokens),
        "num_tokens": len(continuation.tokens),
        "ended_by": "stop" if continuation.has_ended else "max_new_tokens",
    }
    if continuation.score is not None:
        line["score"] = continuation.score
    return line


def read_prompts(path: str) -> list[str]:
    """Returns the prompts of a file: one per line, or JSON lines with ``prompt``.

    Blank lines are left out.

    Args:
        path: JSON lines if its name ends in ``.jsonl``, text otherwise.

    Raises:
        OSError: If it cannot be read.
        ValueError: If a line is not of this form, or there is none.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OSError(
            f"--prompts={path} cannot be read: {error.strerror}. Name a file, with a"
            f" path relative to '{pathlib.Path.cwd()}'."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompts={path} is not UTF-8 at byte {error.start}. Save it as UTF-8."
        ) from error
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"--prompts={path} has no line. Write one prompt per line.")
    if not path.endswith(".jsonl"):
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError):
            prompt = None
        if not isinstance(prompt, str):
            raise ValueError(
                f"--prompts={path}, line {number}: {line[:60]!r} is not a JSON object"
                ' with a text under "prompt", such as {"prompt": "def main("}.'
            )
        prompts.append(prompt)
    return prompts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.generate",
        description="Continues texts with a trained GPT-2.",
        allow_abbrev=False,
    )

    def add(flag: str, help_: str, **settings: object) -> None:
        parser.add_argument(flag, help=help_, **settings)  # type: ignore[arg-type]  # as argparse has them

    command_line.add_trained(parser)
    for flag, help_, dest, metavar, type_ in (
        ("--prompt", "text to continue", "prompts", "TEXT", str),
        ("--stop", "text to end at", "stop_strings", "TEXT", str),
        ("--stop_token", "id of a token to end at", "stop_tokens", "ID", int),
    ):
        add(
            flag,
            f"{help_}; may be repeated",
            action="append",
            default=[],
            dest=dest,
            metavar=metavar,
            type=type_,
        )
    add(
        "--prompts",
        "file of prompts, .jsonl or one per line",
        dest="prompts_file",
        metavar="FILE",
    )
    add("--output", "file of JSON lines to write, instead of printing the texts")
    defaults, sampling = GenerationConfig(), SamplingConfig()
    for name, kind, value, help_ in (
        ("max_new_tokens", int, defaults.max_new_tokens, "that a text may get"),
        ("temperature", float, sampling.temperature, "0 takes the best token"),
        ("top_k", int, sampling.top_k, "draw from so many tokens"),
        ("top_p", float, sampling.top_p, "draw from tokens of this probability"),
        (
            "repetition_penalty",
            float,
            sampling.repetition_penalty,
            "more repeats less; 1 is none",
        ),
        ("num_samples", int, defaults.num_samples, "texts for each prompt"),
        ("num_beams", int, defaults.num_beams, "of a beam search; 1 is none"),
        ("length_penalty", float, defaults.length_penalty, "more favors long texts"),
        ("seed", int, defaults.seed, "of what is drawn"),
        ("global_batch_size", int, defaults.global_batch_size, "texts at once"),
    ):
        shown = "all" if value is None else value
        add(f"--{name}", f"{help_} (default: {shown})", type=kind, default=value)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
