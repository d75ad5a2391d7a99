"""Workdirs as a training run leaves them, of tiny models with random weights."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from launch import job, resolve, workdir
from launch.checkpoint import Checkpointer
from launch.data.whole_texts import END_OF_TEXT
from launch.resolve import DeviceCount
from tests.launch.batches import NO_DATA
from tests.launch.cases import Case

SIZES = {
    "num_layers": 2,
    "model_dim": 16,
    "num_heads": 4,
    "mlp_dim": 32,
    "init_scale": 0.4,  # so that the best token is clearly the best
}
GPT2 = {"name": "gpt2", **SIZES, "vocab_size": 260, "vocab_multiple": 4, "max_len": 48}


def byte_tokenizer():
    """A tokenizer whose tokens are the end of a text, the bytes and three pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([END_OF_TEXT, *alphabet])}
    merges = [("d", "e"), ("de", "f"), ("Ġ", "t")]
    for pair in merges:
        ids["".join(pair)] = len(ids)
    made = tokenizers.Tokenizer(models.BPE(ids, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    return made


def make(directory, *, model=GPT2, data=None, step=7, tokenizer=None):
    """Writes the workdir of a run at ``step``; returns its state."""
    values = {
        "model": model,
        "data": data or {"seq_length": 48},
        "optim": {"name": "lamb"},
        "train": {"global_batch_size": 6, "num_microbatches": 3, "seed": 3},
        "dist": {"data_parallel_size": 1},
    }
    config = resolve.resolve(values, {}, DeviceCount(num_devices=1))
    steps = job.build_steps(config, Case().mesh)
    run = job.Job(config=config, mesh=steps.mesh, data=NO_DATA, steps=steps)
    state = run.create_state()
    workdir.prepare(directory, config, tokenizer)
    with Checkpointer(directory / workdir.CHECKPOINTS) as checkpointer:
        checkpointer.save(step, state, extra=run.extra(step))
    return state
