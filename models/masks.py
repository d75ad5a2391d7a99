"""Which keys a query may see, in a form that grows with the length and not its square.

A mask says what it hides by rules and by arrays of one entry per position. Whoever
computes attention in blocks asks for the mask of a block; `AttentionMask.dense` gives
the whole of it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

Index = int | jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["is_key", "documents", "key_documents", "shift"],
    meta_fields=["is_causal"],
)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMask:
    """Rules that a query and a key must all obey for the query to see the key.

    A pytree: the arrays are its leaves, ``is_causal`` belongs to its structure. The
    arrays may lack the dim of the samples: it is then the mask of a sample.

    Attributes:
        is_causal: Whether a query sees no position after its own.
        is_key: Boolean ``(B, T)``, False on keys that nobody may see, such as padding;
            None if there are none.
        documents: Integers ``(B, L)``, by query, who sees only keys of the same number.
            None if a row is one document.
        key_documents: The same by key, ``(B, T)``; None if keys and queries are the
            same.
        shift: Position of the first query minus that of the first key; None for 0.
    """

    is_causal: bool = False
    is_key: jax.Array | None = None
    documents: jax.Array | None = None
    key_documents: jax.Array | None = None
    shift: Index | None = None

    @property
    def offset(self) -> Index:
        """``shift`` as a number."""
        return 0 if self.shift is None else self.shift

    def visible(self, num_queries: int, num_keys: int) -> jax.Array | None:
        """Returns where a query sees a key, boolean ``(B or 1, L, T)``.

        Of a mask of one sample the result has no dim for it. None if nothing is hidden.

        Args:
            num_queries: L.
            num_keys: T.

        Example:
            >>> documents = jnp.array([[0, 0, 1]])
            >>> mask = AttentionMask(is_causal=True, documents=documents)
            >>> mask.visible(3, 3)[0].astype(int).tolist()
            [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        parts = []
        if self.is_causal:
            query_L, key_T = jnp.arange(num_queries), jnp.arange(num_keys)
            parts.append(key_T[None] <= query_L[:, None] + self.offset)
        if self.is_key is not None:
            parts.append(self.is_key[..., None, :])
        own, others = self.documents, self._key_documents
        if own is not None and others is not None:
            parts.append(own[..., :, None] == others[..., None, :])
        if not parts:
            return None
        rank = max(part.ndim for part in parts)
        parts = [part.reshape(*[1] * (rank - part.ndim), *part.shape) for part in parts]
        return functools.reduce(jnp.logical_and, parts)

    def dense(self, num_queries: int, num_keys: int) -> jax.Array | None:
        """Returns `visible` with a dim for heads, boolean ``(B or 1, 1, L, T)``.

        Example:
            >>> AttentionMask(is_causal=True).dense(2, 3)[0, 0].astype(int).tolist()
            [[1, 0, 0], [1, 1, 0]]
        """
        visible = self.visible(num_queries, num_keys)
        if visible is None:
            return None
        return visible.reshape(-1, 1, *visible.shape[-2:])

    def block(
        self, first_query: Index, num_queries: int, first_key: Index, num_keys: int
    ) -> "AttentionMask":
        """Returns the mask of some consecutive queries and keys.

        Args:
            first_query: May be known at run time alone.
            num_queries: From there on.
            first_key: May be known at run time alone.
            num_keys: From there on.

        Example:
            >>> mask = AttentionMask(is_causal=True).block(2, 2, 1, 3)
            >>> mask.visible(2, 3).astype(int).tolist()
            [[1, 1, 0], [1, 1, 1]]
        """

        def cut(x: jax.Array | None, first: Index, size: int) -> jax.Array | None:
            if x is None:
                return None
            return jax.lax.dynamic_slice_in_dim(x, first, size, axis=-1)

        return AttentionMask(
            is_causal=self.is_causal,
            is_key=cut(self.is_key, first_key, num_keys),
            documents=cut(self.documents, first_query, num_queries),
            key_documents=cut(self._key_documents, first_key, num_keys),
            shift=first_query - first_key + self.offset,
        )

    def pad(self, num_queries: int, num_keys: int) -> "AttentionMask":
        """Returns the mask for more queries and keys, the new keys hidden from all.

        Args:
            num_queries: By how many.
            num_keys: By how many; at least 1 needs ``is_key``.
        """

        def add(x: jax.Array | None, number: int) -> jax.Array | None:
            if x is None or not number:
                return x
            return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, number)])

        return dataclasses.replace(
            self,
            is_key=add(self.is_key, num_keys),
            key_documents=add(self._key_documents, num_keys),
            documents=add(self.documents, num_queries),
        )

    @property
    def _key_documents(self) -> jax.Array | None:
        if self.key_documents is None:
            return self.documents
        return self.key_documents
