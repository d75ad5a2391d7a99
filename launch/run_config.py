"""The values of one run: resolved, validated, frozen."""

import dataclasses

from models import bert


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What to train on; `configs.base` says what each field means."""

    files: tuple[str, ...]
    tokenizer: str | None
    cache_dir: str | None
    seq_length: int
    validation_fraction: float
    masked_fraction: float
    masking: str
    short_fraction: float
    num_workers: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """How to step."""

    name: str
    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    grad_clip_norm: float | None
    warmup_steps: int
    schedule: str
    final_fraction: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, in what portions."""

    num_steps: int
    global_batch_size: int
    num_microbatches: int
    seed: int
    log_every: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistConfig:
    """The three sizes."""

    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_num_layers: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """When and how much to evaluate."""

    every_steps: int | None
    num_batches: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save, what to keep."""

    every_steps: int | None
    keep: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run."""

    model_name: str
    model: bert.BertConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    dist: DistConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
