"""The only file that uses private or changing JAX API. Kept small."""

import contextlib
import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config, core, distributed
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters.batching import BatchTracer
from jax._src.lax import lax
from jax._src.lib import cuda_versions
from jax._src.mesh import empty_abstract_mesh, empty_concrete_mesh
from jax.experimental import multihost_utils, topologies
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def linear_primitive(
    name: str,
    *,
    run: Callable[..., jax.Array],
    lower: Callable[..., jax.Array],
    transpose: Callable[..., jax.Array],
    batch: Callable[..., jax.Array],
) -> Primitive:
    """Returns a primitive of one argument that is linear in it.

    Its parameters ``mesh`` and ``target`` (a spec) say how the result lies.

    Args:
        name: Name that jaxprs show.
        run: Computes it on a concrete array.
        lower: Computes it inside a program that is being compiled.
        transpose: Maps the cotangent of the output to the input's:
            ``transpose(cotangent, input_aval, **params)``.
        batch: Applies it to an array that has a leading dim more:
            ``batch(x, **params)``.
    """
    primitive = Primitive(name)
    primitive.def_impl(run)
    primitive.def_abstract_eval(_output_type)
    mlir.register_lowering(primitive, mlir.lower_fun(lower, multiple_results=False))

    def transpose_rule(cotangent: Any, x: Any, **params: Any) -> list:
        aval = x.aval
        if isinstance(cotangent, ad.Zero):
            return [ad.Zero(aval)]
        return [transpose(cotangent, aval, **params)]

    def batch_rule(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
        return batch(jax.numpy.moveaxis(args[0], dims[0], 0), **params), 0

    ad.deflinear2(primitive, transpose_rule)
    batching.primitive_batchers[primitive] = batch_rule
    return primitive


def _output_type(x: Any, *, mesh: Any, target: PartitionSpec, **_: Any) -> Any:
    return x.update(sharding=NamedSharding(mesh.abstract_mesh, target))


def on_mesh(
    run: Callable[[jax.Array], jax.Array],
    mesh: AbstractMesh,
    *,
    source: PartitionSpec,
    target: PartitionSpec,
) -> Callable[[jax.Array], jax.Array]:
    """Returns ``run`` as a program on each device's shard.

    That outputs are equal where ``target`` says so is ours to guarantee: gathers and
    permutes make replicas that JAX's checker cannot prove. The check protects
    derivatives, and those do not pass through here: primitives have their own.
    """
    return jax.shard_map(
        run, mesh=mesh, in_specs=source, out_specs=target, check_vma=False
    )


@contextlib.contextmanager
def no_mesh_set() -> Iterator[None]:
    """Takes back ``jax.set_mesh`` for a while, also while a function is traced.

    A program on one mesh cannot be lowered while another mesh is set.
    """
    mesh = config.abstract_mesh_context_manager.swap_local(empty_abstract_mesh)
    devices = config.device_context.swap_local(empty_concrete_mesh)
    try:
        yield
    finally:
        config.abstract_mesh_context_manager.set_local(mesh)
        config.device_context.set_local(devices)


def mesh_set() -> AbstractMesh | None:
    """Returns the mesh that ``jax.set_mesh`` set, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def concrete_mesh(x: jax.Array) -> Mesh | None:
    """Returns the mesh with the devices of ``x``, also inside ``grad`` and ``vmap``.

    None if ``x`` is traced by ``jit``, where only an abstract mesh is known.
    """
    while isinstance(x, jax.core.Tracer):
        if isinstance(x, BatchTracer):
            x = x.val
        elif hasattr(x, "primal"):
            x = x.primal
        else:
            break
    sharding = None if isinstance(x, jax.core.Tracer) else x.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


def _linear_identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda x, **_: x, multiple_results=False)
    )
    ad.deflinear2(primitive, lambda ct, x, **params: [primitive.bind(ct, **params)])
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(args[0], **params),
        dims[0],
    )
    return primitive


_expect_devices_p = _linear_identity("sbp_expect_devices")


def expect_devices(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns ``x``, and has ``jit`` raise if it is not on the devices of ``mesh``.

    Types do not carry devices: ``jit`` alone knows those of its arguments. It compares
    them with the devices it finds in the program, for which ``witness`` names them.
    """
    here = NamedSharding(mesh, PartitionSpec())
    witness = jax.make_jaxpr(lambda value: jax.device_put(value, here))(0.0)
    return _expect_devices_p.bind(x, witness=witness)


def sharding_of(x: object) -> NamedSharding | None:
    """Returns the named sharding of an array or tracer; None if it has none.

    A tracer's comes from its type, and its mesh is abstract.
    """
    if isinstance(x, jax.core.Tracer):
        sharding = getattr(jax.typeof(x), "sharding", None)
        return sharding if sharding is not None and not sharding.mesh.empty else None
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def bind(
    primitive: Primitive, operands: Sequence[jax.Array], params: Mapping[str, Any]
) -> Sequence[jax.Array]:
    """Applies a primitive as an equation of a jaxpr does; always gives a sequence."""
    results = primitive.bind(*operands, **primitive.get_bind_params(dict(params)))
    return results if primitive.multiple_results else [results]


def run_equation(eqn: JaxprEqn, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Computes an equation of a jaxpr, under the settings it was traced with.

    The operands may vary over more axes than when it was traced.
    """
    params = eqn.params
    if eqn.primitive.name == "pvary":
        varying = jax.typeof(operands[0]).mat.varying
        missing = tuple(axis for axis in params["axes"] if axis not in varying)
        if not missing:
            return operands
        params = {**params, "axes": missing}
    with eqn.ctx.manager:
        return bind(eqn.primitive, operands, params)


def to_host(x: jax.Array) -> jax.Array:
    """Returns ``x`` in the memory of the host; its type says so."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: jax.Array) -> jax.Array:
    """Returns ``x`` in the memory of the device, as most arrays are."""
    return jax.device_put(x, jax.memory.Space.Device)


def empty_on_host(dtype: Any) -> jax.Array:
    """Returns a scalar in the memory of the host, any one.

    Broadcast to a buffer that is filled later, XLA allocates that there at once. With a
    scalar that was moved there it would fill the buffer, on the host.
    """
    return lax.empty2(dtype, memory_space=jax.memory.Space.Host)


def is_on_host(x: Any) -> bool:
    """Returns whether an array, or a type, is in the memory of the host.

    One that has no word for it is not.
    """
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def source_line(sources: Sequence[Any], hidden: Sequence[str]) -> str:
    """Returns file and line of the innermost frame that is not hidden.

    Args:
        sources: Source information of an equation, then of the calls around it.
        hidden: Folders of libraries, whose frames are passed over.
    """
    for source in sources:
        for frame in source.traceback.frames if source.traceback else ():
            if not frame.file_name.startswith(tuple(hidden)):
                return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def is_tracing() -> bool:
    """Returns whether some transformation is at work, so that arrays may be tracers."""
    return not core.trace_state_clean()


def has_cudnn() -> bool:
    """Returns whether JAX has found cuDNN; call it once there are GPU devices.

    Programs for GPUs that are not there can be compiled without it.
    """
    if cuda_versions is None:
        return False
    try:
        return cuda_versions.cudnn_get_version() > 0
    except RuntimeError:
        return False


def virtual_devices(target: str, sizes: tuple[int, int]) -> Sequence[jax.Device]:
    """Returns GPUs that are not there, for programs to be compiled for.

    Args:
        target: XLA's description of the GPU, as the text of a protocol buffer.
        sizes: Hosts, and GPUs of each.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"{sizes[0]}x1x{sizes[1]}"
    )
    return topology.devices


def cudnn_attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, *, is_causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns means of values ``(B, L, H, K)``, logarithms of sums ``(B, H, L)``.

    The latter are float32; the public function rounds them to the dtype of the values.

    Args:
        q: ``(B, L, H, K)``, as are keys and values; scores are scaled here.
        k: Keys.
        v: Values.
        bias: Added to the scores, ``(B, 1, L, T)``; None for nothing.
        is_causal: Whether a query sees no key of a higher position.
    """
    return cudnn.dot_product_attention(
        q,
        k,
        v,
        bias,
        scale=q.shape[-1] ** -0.5,
        mask_type=_cudnn_mask(is_causal),
        return_residual=True,
    )


def cudnn_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    *,
    lse: jax.Array,
    out: jax.Array,
    grad: jax.Array,
    is_causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of queries, keys and values.

    Args:
        q: See `cudnn_attention_forward`.
        k: See there.
        v: See there.
        bias: See there.
        lse: From there, float32 ``(B, H, L)``; may be over more keys than these.
        out: From there, likewise.
        grad: Gradient of ``out``.
        is_causal: See there.
    """
    unused = jax.numpy.zeros(0, q.dtype)
    given = unused if bias is None else bias
    residuals = (q, k, v, given, *[unused] * 6, lse, out)
    grads = cudnn._dot_product_attention_bwd_rule(
        q.shape[-1] ** -0.5,
        0,  # seed of dropout
        0.0,
        (bias is not None, False),
        _cudnn_mask(is_causal),
        cudnn.AttentionLayout.BTNH.value,
        None,  # window
        cudnn.check_cudnn_version(),
        False,
        residuals,
        grad,
    )
    return grads[:3]


def _cudnn_mask(is_causal: bool) -> cudnn.MaskType:
    return cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK


_MESSAGE_BYTES = 1 << 16


def gather_from_processes(mine: dict[int, Any]) -> dict[int, Any]:
    """Returns the union of the dicts that all processes give; every one must call.

    The values are pickled; together they must fit into 64 kB per process.
    """
    message = pickle.dumps(mine)
    row = np.zeros(_MESSAGE_BYTES, dtype=np.uint8)
    row[: len(message)] = np.frombuffer(message, dtype=np.uint8)
    rows = multihost_utils.process_allgather(row).reshape(-1, _MESSAGE_BYTES)
    return {k: v for row in rows for k, v in pickle.loads(row.tobytes()).items()}


MEETING_SECONDS = 300  # how long a process waits for the others at a conversion


def meet_others(call: str, meshes: Sequence[Mesh]) -> None:
    """Waits until all processes with devices in the meshes make the same call.

    Only the first time for each call: processes that run different code should say so
    in an exception, not wait in a collective.

    Raises:
        TimeoutError: If they do not come.
    """
    devices = (device for mesh in meshes for device in mesh.devices.flat)
    processes = tuple(sorted({device.process_index for device in devices}))
    if len(processes) > 1 and jax.process_index() in processes:
        _meet_once(call, processes)


@functools.cache
def _meet_once(call: str, processes: tuple[int, ...]) -> None:
    name = hashlib.sha256(f"{call}{processes}".encode()).hexdigest()
    client = distributed.global_state.client
    assert client is not None, "several processes have a coordination service"
    try:
        client.wait_at_barrier(f"sbp/{name}", MEETING_SECONDS * 1000, list(processes))
    except jax.errors.JaxRuntimeError as error:
        raise TimeoutError(
            f"Process {jax.process_index()} called {call} and waited "
            f"{MEETING_SECONDS} seconds, but not all of the processes {processes} made "
            "this call. All processes must run the same calls in the same order, with "
            "the same placements and signatures; look for a branch on the rank, or for "
            "a process that is still busy."
        ) from error


def same_in_all_processes(value: np.ndarray) -> bool:
    """Returns whether all processes give the same array; every one must call."""
    if jax.process_count() == 1:
        return True
    digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    mine = {jax.process_index(): (value.shape, value.dtype.name, digest)}
    return len(set(gather_from_processes(mine).values())) == 1
