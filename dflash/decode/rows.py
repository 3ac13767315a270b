"""The target over static rows: keys and values that never move, and attention that reads them.

A model's twin shares its weights and attends by a function of ours for which transformers builds no
mask. Where tokens go and what they may read follows from their positions, numbers on the device,
so one captured forward serves every length, and what was rejected is forgotten by going on from an
earlier position: rows behind the last position are never read before they are overwritten.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash.decode.eager import cache_argument, tap_into
from dflash.target.packable import check_packable
from dflash.target.packed import exact_attention, require_window
from dflash.target.sharing import register_attention, sharing_copy

if TYPE_CHECKING:
    from dflash.target.model import Target

STATIC = "dflash_static"

_reading: ContextVar["StaticRows | None"] = ContextVar("static_rows", default=None)


class NotStaticError(Exception):
    """Why a target cannot be decoded from static buffers; decoding goes on eagerly."""


class StaticRows:
    """Keys and values of S tokens in every layer; to an attention layer it is its cache.

    Rows that hold no token are finite, since a weight of zero does not hide a NaN.
    """

    def __init__(self, like: Any, num_rows: int) -> None:  # noqa: ANN401 (a transformers cache)
        """Allocate rows for what the layers of a filled growing cache keep."""
        self.num_rows = num_rows
        self.keys = [_empty(keys, num_rows) for keys, _ in _layers(like)]
        self.values = [_empty(values, num_rows) for _, values in _layers(like)]
        self.num_updates = 0
        self.num_reads = 0
        self._columns_S = torch.arange(num_rows, device=self.keys[0].device)
        self._allowed: dict[int | None, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def load(self, cache: Any) -> None:  # noqa: ANN401 (a transformers cache)
        """Take over the tokens of a growing cache; leave nothing of what was here."""
        for layer, (keys, values) in enumerate(_layers(cache)):
            for rows, tokens in ((self.keys[layer], keys), (self.values[layer], values)):
                rows.narrow(2, 0, tokens.shape[2]).copy_(tokens)
                rows[:, :, tokens.shape[2] :].zero_()

    @contextmanager
    def at(self, positions_B: Tensor) -> Iterator[None]:
        """Let the layers of this thread write and read the tokens at these positions."""
        self._positions_B = positions_B
        self._allowed.clear()
        self.num_updates = self.num_reads = 0
        token = _reading.set(self)
        try:
            yield
        finally:
            _reading.reset(token)
            self._allowed.clear()

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Called by the attention layers: put the tokens in; return all rows of the layer."""
        self.num_updates += 1
        self.keys[layer_idx].index_copy_(2, self._positions_B, keys)
        self.values[layer_idx].index_copy_(2, self._positions_B, values)
        return self.keys[layer_idx], self.values[layer_idx]

    def get_seq_length(self, *_: object) -> int:
        """Refuse: a length read on the host would be the same in every replay.

        Raises:
            NotStaticError: always.
        """
        raise NotStaticError("the target asks its cache for a length on the host")

    def allowed(self, window: int | None) -> Tensor:
        """Return bool [B, S]; True means the token (row) may read the key (column)."""
        if window not in self._allowed:
            query_B1, key_1S = self._positions_B[:, None], self._columns_S[None, :]
            allowed_BS = key_1S <= query_B1
            if window is not None:
                allowed_BS &= key_1S > query_B1 - window
            self._allowed[window] = allowed_BS
        return self._allowed[window]


def static_attention(  # noqa: PLR0913, PLR0917 (transformers dictates it)
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
    """Attend from tokens to all static rows; called by transformers, once a layer.

    Args:
        module: the attention module; tells whether this layer slides.
        query: [1, H, B, E].
        key: [1, G, S, E], what ``StaticRows.update`` returned.
        value: like key.
        attention_mask: always None, since no mask function is registered.
        scaling: of the scores; default 1 / sqrt(E).
        sliding_window: W keys may be read, the query's own included.
        softcap: bound of the scores.
        s_aux: attention sinks, one score a head.

    Returns:
        [1, B, H, E] and no weights.
    """
    rows = _reading.get()
    if rows is None or attention_mask is not None:
        raise NotStaticError("the target brings an attention mask of its own")
    if key.shape[2] != rows.num_rows:
        raise NotStaticError(f"a layer attends to {key.shape[2]} keys, not to {rows.num_rows} rows")
    rows.num_reads += 1
    require_window(module, sliding_window)
    out = exact_attention(
        query,
        key,
        value,
        allowed=rows.allowed(sliding_window),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2), None


class StaticTarget:
    """A twin of the target that runs over static rows, with the same taps."""

    def __init__(self, target: "Target") -> None:
        """Raises ConfigError where attention is not all that mixes the target's tokens."""
        check_packable(target.model)
        register_attention(STATIC, static_attention)
        self._model = sharing_copy(target.model, attention=STATIC)
        self._taps = tuple(target.taps)
        self._outputs: dict[int, Tensor] = {}
        tap_into(self._model, self._taps, self._outputs)
        self._cache_name = cache_argument(target.model)
        names = inspect.signature(target.model.forward).parameters
        self._takes_cache_position = "cache_position" in names  # before transformers 5

    def forward(
        self, ids_B: Tensor, positions_B: Tensor, rows: StaticRows
    ) -> tuple[Tensor, Tensor]:
        """Run over tokens at these positions; return logits [B, V] and features [B, C].

        Raises:
            NotStaticError: a layer attends in another way, or reads its cache on the host.
        """
        more: dict[str, Any] = {self._cache_name: rows}
        if self._takes_cache_position:
            more["cache_position"] = positions_B
        with rows.at(positions_B):
            out = self._model(
                input_ids=ids_B[None], position_ids=positions_B[None], use_cache=True, **more
            )
        if not rows.num_updates == rows.num_reads == len(rows.keys):
            raise NotStaticError(
                f"of {len(rows.keys)} layers {rows.num_updates} kept their keys and "
                f"{rows.num_reads} attended"
            )
        features_BC = torch.cat([self._outputs[tap] for tap in self._taps], dim=-1)
        self._outputs.clear()  # what is left here would stay allocated in the graphs' pool
        return out.logits[0], features_BC


def rows_bytes(cache: Any, num_rows: int) -> int:  # noqa: ANN401 (a transformers cache)
    """What ``StaticRows`` like this cache would take."""
    tensors = [tensor for pair in _layers(cache) for tensor in pair]
    return sum(tensor.nbytes // tensor.shape[2] * num_rows for tensor in tensors)


def _layers(cache: Any) -> Sequence[tuple[Tensor, Tensor]]:  # noqa: ANN401
    """Keys and values, layer by layer, of a transformers cache that was run once."""
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    if not all(isinstance(tensor, Tensor) for pair in pairs for tensor in pair):
        raise NotStaticError("some layers of the target keep no keys of their own")
    return pairs


def _empty(like: Tensor, num_rows: int) -> Tensor:
    return like.new_zeros(*like.shape[:2], num_rows, like.shape[3])
