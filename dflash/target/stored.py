"""Attention over stored keys and values, for batched generation.

transformers' caches and their arguments change between versions, and a captured CUDA graph needs
fixed buffers and no Python state; so generation stores keys and values itself and asks
transformers for nothing but the forward of the tokens at hand.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from dflash.target.packed import exact_attention, require_window

STORED = "dflash_stored"
MAX_SCORES = 2**28
"""Scores made at once while a batch of prompts is read; more rows are taken in turns."""


class KeyValueStore:
    """Keys and values of R left-padded rows in columns of a fixed number.

    Attributes:
        column: int64 [], the column that the next token goes to; the caller moves it.
        first_R: int64, the column of each row's first token; what is left of it is padding.
    """

    def __init__(self, *, num_rows: int, num_columns: int, device: torch.device) -> None:
        self.num_columns = num_columns
        self.column = torch.zeros((), dtype=torch.int64, device=device)
        self.first_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._all_columns = torch.arange(num_columns, device=device)
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store [R, G, n, E] at the current columns; return all columns written or not."""
        if layer not in self._stored:
            rows, groups, _, width = key.shape
            shape = (rows, groups, self.num_columns)
            keys, values = key.new_zeros(*shape, width), value.new_zeros(*shape, value.shape[-1])
            self._stored[layer] = keys, values
        keys, values = self._stored[layer]
        columns = self.column + self._all_columns[: key.shape[2]]
        keys.index_copy_(2, columns, key)
        values.index_copy_(2, columns, value)
        return keys, values

    def allowed(self, num_queries: int, num_keys: int, window: int | None) -> Tensor:
        """Return bool [R, 1, 1, n, m]; True means the query may read the key.

        A query in the padding reads itself, so that no softmax is empty.
        """
        query = (self.column + self._all_columns[:num_queries])[None, :, None]
        key = self._all_columns[None, None, :num_keys]
        allowed = (key <= query) & (key >= self.first_R[:, None, None])
        if window is not None:
            allowed &= key > query - window
        return (allowed | (key == query))[:, None, None]


_store: ContextVar[KeyValueStore | None] = ContextVar("key_value_store", default=None)


@contextmanager
def attend_to(store: KeyValueStore) -> Iterator[None]:
    """Let stored attention in this thread use this store."""
    token = _store.set(store)
    try:
        yield
    finally:
        _store.reset(token)


def stored_attention(  # noqa: PLR0913, PLR0917 (transformers dictates it)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Store the new keys and values and attend; arguments as in ``packed_attention``.

    The tokens are either a whole prompt at column 0, which reads only itself, or one per row.
    """
    store = _store.get()
    if store is None or attention_mask is not None:
        raise RuntimeError("stored attention runs inside attend_to only, and takes no mask")
    require_window(module, sliding_window)
    num_queries = query.shape[2]
    layer: Any = module.layer_idx
    keys, values = store.update(layer, key, value)
    if num_queries > 1:
        keys, values = key, value
    allowed = store.allowed(num_queries, keys.shape[2], sliding_window)
    turn = max(1, MAX_SCORES // (query.shape[1] * num_queries * keys.shape[2]))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outs = [
        exact_attention(q, k, v, allowed=ok, scale=scale, softcap=softcap, sinks=s_aux)
        for q, k, v, ok in zip(
            *(torch.split(part, turn) for part in (query, keys, values, allowed)), strict=True
        )
    ]
    return torch.cat(outs).transpose(1, 2), None
