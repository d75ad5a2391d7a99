"""The values of one run: validated and frozen. `launch.resolve` makes them.

Each section checks its own fields in ``broken_rules``; what relates sections to each
other stands in `RunConfig.broken_rules`. A rule gives the values, the rule and the
remedy.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from launch import ramp_up
from launch.precision import PrecisionConfig
from launch.ramp_up import BatchSizes
from models.lora import LoraConfig
from models.remat import broken_rules as broken_remat_rules
from models.rules import at_least, between, one_of

MASKINGS = ("token", "whole_word", "ngram")
OPTIMIZERS = ("adamw", "lamb", "adafactor", "lion", "muon")
STATE_DTYPES = ("float32", "bfloat16")
PIPELINE_SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
VOCABULARY_PLACES = ("all_stages", "first_and_last_stage")
ZERO_STAGES = (0, 1, 2, 3)
SCHEDULES = ("constant", "cosine", "polynomial", "exponential", "steps")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What to train on; `configs.base` says what each field means."""

    files: tuple[str, ...] = ()
    tokenizer: str | None = None
    cache_dir: str | None = None
    seq_length: int = 128
    validation_fraction: float = 0.05
    masked_fraction: float = 0.15
    masking: str = "whole_word"
    short_fraction: float = 0.1
    separate_documents: bool = True
    validation_files: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    label_smoothing: float = 0.0
    skip_broken: bool = False
    pixel_mean: tuple[float, ...] = (0.5,)
    pixel_std: tuple[float, ...] = (0.5,)
    crop_area: float = 1.0
    flip: bool = False
    randaugment_layers: int = 0
    randaugment_magnitude: float = 9.0
    erasing_probability: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    num_workers: int = 0

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        # [CLS], [SEP], [SEP] and a token in each of the two segments.
        yield from at_least(
            self,
            seq_length=5,
            num_workers=0,
            randaugment_layers=0,
            mixup_alpha=0,
            cutmix_alpha=0,
        )
        yield from between(
            self,
            validation_fraction=(0, 1),
            masked_fraction=(0, 1),
            short_fraction=(0, 1),
            crop_area=(0.01, 1),
            randaugment_magnitude=(0, 10),
            erasing_probability=(0, 1),
            label_smoothing=(0, 1),
        )
        yield from one_of(self, masking=MASKINGS)
        if self.masked_fraction == 0:
            yield "masked_fraction=0 leaves nothing to predict. BERT uses 0.15."
        if not all(std > 0 for std in self.pixel_std):
            yield f"pixel_std={self.pixel_std} must all be above 0."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """How to step; `configs.base` says what each field means."""

    name: str = "adamw"
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.95
    epsilon: float = 1e-8
    grad_clip_norm: float | None = None
    warmup_steps: int = 0
    schedule: str = "polynomial"
    final_fraction: float = 0.0
    power: float = 1.0
    milestones: tuple[float, ...] = (0.5, 0.75)
    decay_factor: float = 0.1
    state_dtype: str = "float32"
    offload: bool = False

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from one_of(
            self, name=OPTIMIZERS, schedule=SCHEDULES, state_dtype=STATE_DTYPES
        )
        yield from at_least(
            self, learning_rate=0, weight_decay=0, epsilon=0, warmup_steps=0, power=0
        )
        yield from between(self, final_fraction=(0, 1), decay_factor=(0, 1))
        for field, values in {
            "betas": self.betas,
            "momentum": (self.momentum,),
            "milestones": self.milestones,
        }.items():
            if not all(0 <= value < 1 for value in values):
                yield f"{field}={values} must all be at least 0 and below 1."
        if self.grad_clip_norm is not None and self.grad_clip_norm <= 0:
            yield (
                f"grad_clip_norm={self.grad_clip_norm} must be above 0. Use None for"
                " no clipping."
            )
        if self.schedule == "exponential" and self.final_fraction == 0:
            yield (
                "schedule='exponential' never reaches final_fraction=0. Use a fraction"
                " above 0, such as 0.01."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, in what portions; `configs.base` says what each field means."""

    num_steps: int = 1000
    global_batch_size: int = 32
    num_microbatches: int = 1
    rampup_batch_size: tuple[int, int, int] | None = None
    seed: int = 1234
    log_every: int = 20

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from at_least(
            self, num_steps=1, global_batch_size=1, num_microbatches=1, log_every=1
        )
        yield from between(self, seed=(0, 2**32 - 1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistConfig:
    """The sizes of a layout; `configs.base` says what each field means."""

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_num_layers: int | None = None
    pipeline_schedule: str = "1f1b"
    pipeline_num_chunks: int = 1
    pipeline_stage_layers: tuple[int, ...] | str | None = None
    pipeline_vocabulary: str = "all_stages"

    @property
    def num_devices(self) -> int:
        """Devices of the run."""
        return (
            self.data_parallel_size
            * self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.context_parallel_size
        )

    @property
    def sizes(self) -> str:
        """The sizes in words, in the order of the mesh."""
        is_split = self.context_parallel_size > 1
        context = f" x context {self.context_parallel_size}" if is_split else ""
        return (
            f"stage {self.pipeline_parallel_size} x data {self.data_parallel_size}"
            f"{context} x tensor {self.tensor_parallel_size}"
        )

    @property
    def layout(self) -> str:
        """The sizes as one name."""
        is_split = self.context_parallel_size > 1
        context = f"_cp{self.context_parallel_size}" if is_split else ""
        return (
            f"dp{self.data_parallel_size}_tp{self.tensor_parallel_size}"
            f"_pp{self.pipeline_parallel_size}{context}"
        )

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from at_least(
            self,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            context_parallel_size=1,
            pipeline_num_chunks=1,
        )
        yield from one_of(
            self,
            pipeline_schedule=PIPELINE_SCHEDULES,
            pipeline_vocabulary=VOCABULARY_PLACES,
        )
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            yield (
                "sequence_parallel=True splits activations over the ranks of"
                " tensor_parallel_size=1, which is one. Use a size of at least 2, or"
                " sequence_parallel=False."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """What is cut over data-parallel ranks; `configs.base` says what fields mean."""

    stage: int = 0
    min_size: int = 2**14
    group_size: int | None = None

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from one_of(self, stage=ZERO_STAGES)
        yield from at_least(self, min_size=1, group_size=1)
        if self.stage == 0 and self.group_size is not None:
            yield (
                f"group_size={self.group_size} has no meaning for stage=0, which cuts"
                " nothing. Leave it at None, or use stage 1, 2 or 3."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """When and how much to evaluate; `configs.base` says what each field means."""

    every_steps: int | None = None
    num_batches: int | None = None

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from at_least(self, every_steps=1, num_batches=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save, what to keep; `configs.base` says what each field means."""

    every_steps: int | None = None
    keep: int = 3

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from at_least(self, every_steps=1, keep=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RootConfig:
    """The fields in no section; `configs.base` says what each field means."""

    init_from: str | None = None
    remat: str | dict[str, str] = "none"

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from broken_remat_rules(self.remat)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run.

    Attributes:
        model_name: Key of `models.MODELS`.
        model: The config of that family.
        root: The fields in no section.
    """

    model_name: str
    model: Any
    root: RootConfig = RootConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    dist: DistConfig = DistConfig()
    zero: ZeroConfig = ZeroConfig()
    precision: PrecisionConfig = PrecisionConfig()
    lora: LoraConfig = LoraConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def microbatch_size(self) -> int:
        """Samples of one data-parallel rank that pass through the model at once."""
        parts = self.dist.data_parallel_size * self.train.num_microbatches
        return self.train.global_batch_size // parts

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch size of each step."""
        train = self.train
        return ramp_up.build(train.rampup_batch_size, train.global_batch_size)

    def at_batch_size(self, size: int) -> "RunConfig":
        """Returns the config of steps of this size, with microbatches as here."""
        parts = size // (self.dist.data_parallel_size * self.microbatch_size)
        train = dataclasses.replace(
            self.train,
            global_batch_size=size,
            num_microbatches=parts,
            rampup_batch_size=None,
        )
        return dataclasses.replace(self, train=train)

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken relation between sections.

        Those that depend on the kind of model are in `launch.families`.
        """
        yield from self._broken_batch_rules()
        ranks, group_size = self.dist.data_parallel_size, self.zero.group_size
        if group_size is not None and ranks % group_size:
            divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
            yield (
                f"zero.group_size={group_size} does not divide"
                f" dist.data_parallel_size={ranks}. Use one of"
                f" {', '.join(map(str, divisors))}."
            )
        layers = self.model.num_layers
        if self.dist.pipeline_num_layers not in (None, layers):
            yield (
                f"dist.pipeline_num_layers={self.dist.pipeline_num_layers} is not"
                f" model.num_layers={layers}. Leave it at None to take the model's."
            )
        if self.optim.warmup_steps > self.train.num_steps:
            yield (
                f"optim.warmup_steps={self.optim.warmup_steps} is more than"
                f" train.num_steps={self.train.num_steps}. Warm up in fewer steps."
            )

    def _broken_batch_rules(self) -> Iterator[str]:
        size, parts = self.train.global_batch_size, self.train.num_microbatches
        ranks = self.dist.data_parallel_size
        if size % (ranks * parts):
            step = ranks * parts
            multiples = size // step * step, -(-size // step) * step
            remedy = " or ".join(str(multiple) for multiple in multiples if multiple)
            yield (
                f"train.global_batch_size={size} is not divisible by"
                f" dist.data_parallel_size={ranks} x train.num_microbatches={parts}."
                f" Use {remedy}" + (", or fewer microbatches." if parts > 1 else ".")
            )
        else:
            yield from ramp_up.broken_rules(
                self.train.rampup_batch_size, size, multiple=size // parts
            )
