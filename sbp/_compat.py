"""The only file that uses private or changing JAX API. Kept small."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding


def linear_primitive(
    name: str,
    *,
    run: Callable[..., jax.Array],
    lower: Callable[..., jax.Array],
    transpose: Callable[..., jax.Array],
    batch: Callable[..., jax.Array],
) -> Primitive:
    """Returns a primitive of one argument that is linear in it.

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
    primitive.def_abstract_eval(lambda x, **params: _output_type(lower, x, params))
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


def _output_type(lower: Callable, x: Any, params: dict) -> Any:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.make_jaxpr(lambda v: lower(v, **params))(like).out_avals[0]


def sharding_of(x: object) -> NamedSharding | None:
    """Returns the named sharding of an array or tracer; None if it has none.

    A tracer's comes from its type, and its mesh is abstract.
    """
    if isinstance(x, jax.core.Tracer):
        sharding = getattr(jax.typeof(x), "sharding", None)
        return sharding if sharding is not None and not sharding.mesh.empty else None
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
