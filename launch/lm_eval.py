"""Evaluates a trained GPT-2 on tasks of lm-evaluation-harness.

    pip install -e '.[lm_eval]'
    python -m launch.lm_eval --workdir=runs/gpt2 --tasks=lambada_openai,hellaswag

The workdir is that of a run, or what ``launch.convert --to=sbp`` has made of a
published model. Tasks of your own are files of that package's form in a folder named by
``--include_path``. See docs/generation.md.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from launch import answers, command_line, workdir
from launch.trained import open_trained


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    options = parse(arguments)
    return command_line.exit_code(lambda: run(options))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns what the command line says; argparse ends the program if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.lm_eval",
        description="Evaluates a trained GPT-2 with lm-evaluation-harness.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    command_line.add_trained(parser)
    add("--tasks", required=True, help="names, separated by commas")
    add("--include_path", help="folder of more tasks")
    add("--num_fewshot", type=int, help="examples in a context, if not the task's")
    add("--limit", type=int, help="examples of each task, if not all")
    add("--output", help="JSON file to write the results to")
    add("--global_batch_size", type=int, default=16, help="texts at once (default: 16)")
    options = parser.parse_args(arguments)
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        number = getattr(options, name)
        if number is not None and number < least:
            parser.error(f"--{name}={number} must be at least {least}.")
    folder = options.include_path
    if folder is not None and not pathlib.Path(folder).is_dir():
        parser.error(f"--include_path={folder} is no folder. Name one of task files.")
    return options


def run(options: argparse.Namespace) -> None:
    """Evaluates; prints a table and writes the results.

    Raises:
        ValueError: If a task is unknown, or lm-evaluation-harness is not installed.
    """
    workdir.check_output(options.output)
    workdir.load_config(options.workdir)  # before the tasks, which take their time
    try:
        from lm_eval import evaluator, tasks, utils
    except ImportError as error:
        raise ValueError(
            "lm-evaluation-harness is not installed. Run pip install -e '.[lm_eval]'."
        ) from error
    names = options.tasks.split(",")
    manager = tasks.TaskManager(include_path=options.include_path)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ValueError(
            f"--tasks={options.tasks}: there is no task {', '.join(unknown)}. Name one"
            " of lm-evaluation-harness, or a folder of your own by --include_path."
        )
    trained = open_trained(
        options.workdir,
        step=options.step,
        data_parallel_size=options.data_parallel_size,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    model = answers.build(trained, global_batch_size=options.global_batch_size)
    results = evaluator.simple_evaluate(
        model=answers.to_lm(model),
        tasks=names,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        task_manager=manager,
        log_samples=False,
    )
    print(utils.make_table(results))
    if options.output is not None:
        text = json.dumps(results["results"], indent=2)
        workdir.write_whole(pathlib.Path(options.output), text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
