"""What a run says of itself before it begins."""

from collections.abc import Iterator
from typing import Any

from launch import families, resolve
from launch.checkpoint import Checkpointer
from launch.hardware import Peak
from launch.job import Job, attention_of
from launch.progress import format_bytes
from launch.resolve import DeviceCount
from launch.run_config import RunConfig


def describe_config(config: RunConfig) -> Iterator[str]:
    """Yields a line per section, every field resolved that means something to it."""
    used = families.FAMILIES[config.model_name].data_fields
    values = resolve.to_values(config)
    root = {name: values.pop(name) for name in resolve.ROOT_FIELDS}
    for name, section in {"run": root, **values}.items():
        fields = (
            f"{field}={value}"
            for field, value in section.items()
            if name != "data" or field in used
        )
        yield f"{name}: " + " ".join(fields)


def describe_devices(job: Job, devices: DeviceCount) -> str:
    """Returns a line on the layout and where its devices are from."""
    dist = job.config.dist
    kind = job.mesh.devices.flat[0].device_kind
    if devices.num_devices is None:
        kind = f"virtual CPU, set up since {devices.reason}"
    return f"devices: {dist.num_devices} ({kind}) = {dist.sizes}"


def describe_attention(job: Job) -> str:
    """Returns a line on what computes attention."""
    name = attention_of(job.config, job.mesh)
    return f"attention: {name} (model.attention={job.config.model.attention!r})"


def describe_program(job: Job, compiled: Any, seconds: float, peak: Peak) -> str:
    """Returns a line on the compiled step: size of the model, memory, peak."""
    memory = compiled.memory_analysis()
    kept, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    trained = job.num_trained
    few = "" if trained == job.num_params else f", {trained:,} of them trained"
    return (
        f"step: {job.num_params:,} parameters{few}, compiled in {seconds:.1f} s, per"
        f" device {format_bytes(kept)} of state and batch and"
        f" {format_bytes(temporary)} of temporaries; peak"
        f" {peak.flops_per_second / 1e12:.3g} TFLOP/s ({peak.source})"
    )


def describe_changes(job: Job, checkpointer: Checkpointer) -> Iterator[str]:
    """Yields what differs from the run that saved the newest checkpoint."""
    yield f"going on from step {checkpointer.latest_step()}"
    if changes := job.changes_since(checkpointer.read_extra()):
        yield "changed since then: " + ", ".join(changes)


def describe_end(job: Job, step: int) -> str:
    """Returns a line for a run that has nothing left to do."""
    return (
        f"step {step} is done, of train.num_steps={job.config.train.num_steps}:"
        " there is nothing left to do. Raise train.num_steps to go on."
    )
