"""Whole runs of `launch.train` of the smallest GPT-2, in a few seconds."""

import json
import shutil

from launch import train
from launch.metrics import read_metrics

FIELDS = {
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.model_dim": 16,
    "model.mlp_dim": 32,
    "model.vocab_size": 320,
    "model.max_len": 32,
    "data.seq_length": 32,
    "optim.warmup_steps": 1,
    "train.num_steps": 6,
    "train.global_batch_size": 8,
    "train.log_every": 1,
    "checkpoint.every_steps": 2,
    "eval.num_batches": 1,
}
TIMED = "second", "utilization", "memory"


def launcher(folder, **fields):
    """Returns ``run(workdir, *flags, **fields)``, which returns the exit code.

    Args:
        folder: For a text of functions, all alike, and its tokens.
        fields: Of the config, in all runs.
    """
    text = "def add(a, b):\n    return a + b\n\n\n" * 10
    lines = [json.dumps({"text": f"# {n}\n{text}"}) for n in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    data = {"data.files": folder / "text.jsonl", "data.cache_dir": folder / "cache"}

    def run(workdir, *flags, **given):
        named = FIELDS | data | fields | given
        overrides = [f"--config.{name}={value}" for name, value in named.items()]
        config = "--config=configs/gpt2_tiny.py"
        return train.main([config, f"--workdir={workdir}", *overrides, *flags])

    return run


def numbers_of(workdir):
    """The metrics of a run that do not depend on the clock."""
    return [
        {k: v for k, v in record.items() if not any(word in k for word in TIMED)}
        for record in read_metrics(workdir / "metrics.jsonl")
    ]


def check_resumed(launch, finished, workdir):
    """Asserts that a run which goes on from step 2 is the same.

    Args:
        launch: From `launcher`.
        finished: Workdir of the run.
        workdir: A new one.
    """
    shutil.copytree(finished, workdir)
    for step in (4, 6):
        shutil.rmtree(workdir / "checkpoints" / str(step))

    assert launch(workdir, "--resume") == 0

    assert numbers_of(workdir) == numbers_of(finished)
