"""Attention over a sequence that is spread over the devices of a mesh axis.

The devices stand in a ring (arXiv:2310.01889). Each keeps its queries; keys and values
are passed on from one to the next, until every device has seen them all. What a device
finds with some of the keys is put together by the logarithms of the sums of weights,
and the backward pass goes around once more, with the gradients of keys and values.

A device holds one part of the sequence, or two if a query sees nothing after it: the
parts ``r`` and ``2 * size - 1 - r`` on rank ``r``. Every device then has two pairs of
parts to work on for each arrival, no more and no less, and nothing is computed only to
be hidden, but on the diagonal:

===========================  ==========================================================
arrival                      pairs (queries, keys)
===========================  ==========================================================
own                          (early, early) and (late, late), both causal, (late, early)
from a rank before this one  (early, early), (late, early)
from a rank after this one   (late, early), (late, late)
===========================  ==========================================================

How keys and values get from rank to rank is in `launch.passing`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from launch.partial_attention import Means
from launch.ring import Ring, num_parts
from models.blocked_attention import merge
from models.masks import AttentionMask, Index
from models.weight_dropout import WeightDropout
from sbp.pipeline import slots


class Pair(NamedTuple):
    """A part of the queries and one of the keys; of two parts, 0 is the early one."""

    queries: Index
    keys: Index
    is_causal: bool


OWN_PAIRS: Mapping[bool, tuple[Pair, ...]] = {
    True: (Pair(0, 0, True), Pair(1, 0, False), Pair(1, 1, True)),
    False: (Pair(0, 0, False),),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    ring: Ring,
    q_BLHK: jax.Array,
    k_BLHK: jax.Array,
    v_BLHK: jax.Array,
    mask: AttentionMask,
    dropout: WeightDropout | None = None,
) -> jax.Array:
    """Returns for each of this rank's queries the weighted mean of all ranks' values.

    The result, ``(B, L, H, K)`` in the dtype of the values, is that of attention over
    the whole sequence on one device, to rounding; sums over arrivals are in float32.
    For the backward pass the arguments, the result and one number per query and head
    are kept, the latter two by the names ``attention_values`` and ``attention_lse``.

    Args:
        ring: The ranks.
        q_BLHK: This rank's queries; L is the length of what a rank holds, its parts one
            after the other.
        k_BLHK: Its keys.
        v_BLHK: Its values.
        mask: Of these queries and keys among themselves; what holds for a key or a
            document goes around with the keys.
        dropout: Of the weights of the whole sequence.

    Arguments and result may be split over ``ring.head_axis`` by heads.

    Communication: keys and values go around once, and in the backward pass they do so
    again, together with their gradients in float32.
    """
    return _forward(ring, q_BLHK, k_BLHK, v_BLHK, mask, dropout)[0]


def _forward(ring: Ring, *arguments: Any) -> tuple[jax.Array, tuple]:
    run = functools.partial(_go_forward, ring)
    out_BLHK, lse_BLH = ring.per_heads(run, arguments, num_whole=2)
    out_BLHK = checkpoint_name(out_BLHK, "attention_values")
    lse_BLH = checkpoint_name(lse_BLH, "attention_lse")
    return out_BLHK, (arguments, out_BLHK, lse_BLH)


def _backward(ring: Ring, residuals: tuple, grad_BLHK: jax.Array) -> tuple:
    (q, k, v, *rules), out_BLHK, lse_BLH = residuals
    run = functools.partial(_go_backward, ring)
    arguments = (q, k, v, out_BLHK, lse_BLH, grad_BLHK, *rules)
    return *ring.per_heads(run, arguments, num_whole=2), None, None


attend.defvjp(_forward, _backward)


def _go_forward(
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: AttentionMask,
    dropout: WeightDropout | None,
) -> Means:
    """Returns means of values ``(B, L, H, K)``, logarithms of sums ``(B, L, H)``."""
    work = _Work.of(ring, q, mask, dropout)

    def run(held: _Held, pair: Pair, number: Index) -> Means:
        q, k, v = slots.read_all(work.queries, pair.queries), *held.read(pair.keys)
        means, lse = ring.attention.forward(q, k, v, *work.rules(held, pair, number))
        return means.astype(jnp.float32), lse

    def start(held: _Held) -> Means:
        found: dict[Index, Means] = {}
        for pair in OWN_PAIRS[mask.is_causal]:
            new, i = run(held, pair, 0), pair.queries
            found[i] = merge(found[i], new) if i in found else new
        return _stack(found)

    def step(held: _Held, found: Means, number: Index) -> Means:
        for pair in work.pairs(number):
            merged = merge(slots.read_all(found, pair.queries), run(held, pair, number))
            found = slots.put_all(found, merged, pair.queries)
        return found

    held = work.held(k, v)
    means, lse = ring.passing.forward(ring.axis_name, ring.size, held, start, step)
    return _join(means).astype(v.dtype), _join(lse)


def _go_backward(  # noqa: PLR0913 - one parameter per tensor
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out_BLHK: jax.Array,
    lse_BLH: jax.Array,
    grad_BLHK: jax.Array,
    mask: AttentionMask,
    dropout: WeightDropout | None,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of queries, keys and values, ``(B, L, H, K)``."""
    work = _Work.of(ring, q, mask, dropout)
    results = dict(out_BLHK=out_BLHK, lse_BLH=lse_BLH, grad_BLHK=grad_BLHK)
    results = _split(results, work.queries.shape[0])

    def run(held: _Held, pair: Pair, number: Index) -> tuple:
        q, k, v = slots.read_all(work.queries, pair.queries), *held.read(pair.keys)
        grad_q, *grads = ring.attention.backward(
            q,
            k,
            v,
            *work.rules(held, pair, number),
            **slots.read_all(results, pair.queries),
        )
        return jax.tree.map(lambda x: x.astype(jnp.float32), (grad_q, grads))

    def start(held: _Held) -> tuple:
        by_query: dict[Index, Any] = {}
        by_key: dict[Index, Any] = {}
        for pair in OWN_PAIRS[mask.is_causal]:
            of_query, of_key = run(held, pair, 0)
            by_query[pair.queries] = _add(by_query.get(pair.queries), of_query)
            by_key[pair.keys] = _add(by_key.get(pair.keys), of_key)
        return _stack(by_query), _stack(by_key)

    def step(held: _Held, grad_q: Any, grad_keys: Any, number: Index) -> tuple:
        for pair in work.pairs(number):
            of_query, of_key = run(held, pair, number)
            grad_q = _add_at(grad_q, of_query, pair.queries)
            grad_keys = _add_at(grad_keys, of_key, pair.keys)
        return grad_q, grad_keys

    held, backward = work.held(k, v), ring.passing.backward
    grad_q, grad_keys = backward(ring.axis_name, ring.size, held, start, step)
    grads = (grad_q, *grad_keys)
    typed = [_join(g).astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)]
    return tuple(typed)


class _Held(NamedTuple):
    """What goes around: all that others need of a rank's keys, a new dim for parts."""

    k: jax.Array
    v: jax.Array
    is_key: jax.Array | None
    documents: jax.Array | None

    def read(self, part: Index) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values of a part."""
        return slots.read_all((self.k, self.v), part)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a rank has to do.

    Attributes:
        ring: The ranks.
        rank: This one.
        queries: ``(parts, B, L / parts, H, K)``.
        mask: Its arrays with a dim for parts in front.
        dropout: Of the whole.
    """

    ring: Ring
    rank: jax.Array
    queries: jax.Array
    mask: AttentionMask
    dropout: WeightDropout | None

    @classmethod
    def of(
        cls,
        ring: Ring,
        q_BLHK: jax.Array,
        mask: AttentionMask,
        dropout: WeightDropout | None,
    ) -> "_Work":
        num = num_parts(is_causal=mask.is_causal)
        return cls(
            ring=ring,
            rank=jax.lax.axis_index(ring.axis_name),
            queries=_split(q_BLHK, num),
            mask=_split(mask, num),
            dropout=dropout,
        )

    def held(self, k_BLHK: jax.Array, v_BLHK: jax.Array) -> _Held:
        """Returns this rank's own."""
        mask, num = self.mask, self.queries.shape[0]
        keys = mask.key_documents
        documents = mask.documents if keys is None else keys
        return _Held(_split(k_BLHK, num), _split(v_BLHK, num), mask.is_key, documents)

    def pairs(self, number: Index) -> tuple[Pair, ...]:
        """Returns what there is to do with an arrival: always as much."""
        if not self.mask.is_causal:
            return (Pair(0, 0, False),)
        # The first arrivals are from the ranks before this one.
        part = jnp.where(number <= self.rank, 0, 1)
        return Pair(1, 0, False), Pair(part, part, False)

    def rules(
        self, held: _Held, pair: Pair, number: Index
    ) -> tuple[AttentionMask, WeightDropout | None]:
        """Returns mask and dropout of a pair, its keys of this arrival."""
        mask = AttentionMask(
            is_causal=pair.is_causal,
            is_key=slots.read_all(held.is_key, pair.keys),
            documents=slots.read_all(self.mask.documents, pair.queries),
            key_documents=slots.read_all(held.documents, pair.keys),
        )
        if self.dropout is None:
            return mask, None
        source = (self.rank - number) % self.ring.size
        _, _, length, num_heads, _ = self.queries.shape
        axis = self.ring.head_axis
        dropout = dataclasses.replace(
            self.dropout,
            first_head=jax.lax.axis_index(axis) * num_heads if axis else 0,
            first_query=self.ring.part(self.rank, pair.queries) * length,
            first_key=self.ring.part(source, pair.keys) * length,
        )
        return mask, dropout


def _split(tree: Any, num: int) -> Any:
    """Returns ``(num, B, L / num, ...)`` of each ``(B, L, ...)``."""

    def split(x: jax.Array) -> jax.Array:
        size, length, *rest = x.shape
        return jnp.moveaxis(x.reshape(size, num, length // num, *rest), 1, 0)

    return jax.tree.map(split, tree)


def _join(x: jax.Array) -> jax.Array:
    """Returns what was split."""
    num, size, length, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(size, num * length, *rest)


def _stack(parts: Mapping[Index, Any]) -> Any:
    """Returns trees of parts 0, ... as one, with a dim for parts in front."""
    in_order = [parts[i] for i in range(len(parts))]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *in_order)


def _add(total: Any, more: Any) -> Any:
    return more if total is None else jax.tree.map(jnp.add, total, more)


def _add_at(total: Any, more: Any, part: Index) -> Any:
    return slots.put_all(total, _add(slots.read_all(total, part), more), part)
