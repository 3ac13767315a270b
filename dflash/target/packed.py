"""Attention over documents laid end to end: causal within each, never across, no T x T mask.

On CUDA in half precision it is one variable-length flash kernel. Otherwise, and for what that
kernel lacks (soft-capping, sinks, wide heads), it is one exact attention for each document.

The documents travel in a context variable: each thread has its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name torch itself uses)

from dflash.errors import ConfigError

PACKED = "dflash_packed"
FLASH_MAX_HEAD_DIM = 256
FLASH_HEAD_DIM_MULTIPLE = 8
ROUND_TO = 128
"""Offsets and lengths are padded to multiples, so that shapes seldom change between batches."""


@dataclass(slots=True)
class Documents:
    """Where the documents of one packed batch begin and end.

    Attributes:
        bounds: host offsets, 0 first, T last; the padding tail is a document of its own.
        bounds_flash: the same on the device, int32, padded with T (empty documents at the end).
        num_calls: attention calls so far, one for each layer that ran.
    """

    bounds: Sequence[int]
    bounds_flash: Tensor | None
    num_calls: int = 0

    @property
    def longest(self) -> int:
        """Length of the longest document, rounded up."""
        longest = max(stop - start for start, stop in pairwise(self.bounds))
        return -(-longest // ROUND_TO) * ROUND_TO


_documents: ContextVar[Documents | None] = ContextVar("packed_documents", default=None)


@contextmanager
def attend_within(bounds: Sequence[int], device: torch.device) -> Iterator[Documents]:
    """Let packed attention in this thread see these documents."""
    documents = Documents(bounds, _bounds_flash(bounds, device) if device.type == "cuda" else None)
    token = _documents.set(documents)
    try:
        yield documents
    finally:
        _documents.reset(token)


def _bounds_flash(bounds: Sequence[int], device: torch.device) -> Tensor:
    missing = -len(bounds) % ROUND_TO
    padded = torch.tensor([*bounds, *[bounds[-1]] * missing], dtype=torch.int32).pin_memory()
    return padded.to(device, non_blocking=True)


def packed_attention(  # noqa: PLR0913, PLR0917 (transformers dictates it)
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
    """Attend within the documents of ``attend_within``; called by transformers, once a layer.

    Args:
        module: the attention module; tells whether this layer slides.
        query: [1, H, T, E].
        key: [1, G, T, E]; each key head serves H / G query heads.
        value: like key.
        attention_mask: always None, since no mask function is registered.
        scaling: of the scores; default 1 / sqrt(E).
        sliding_window: W keys may be read, the query's own included.
        softcap: bound of the scores.
        s_aux: attention sinks, one score a head.

    Returns:
        [1, T, H, E] and no weights.
    """
    documents = _documents.get()
    if documents is None or attention_mask is not None:
        raise RuntimeError("packed attention runs inside attend_within only, and takes no mask")
    documents.num_calls += 1
    require_window(module, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plain = softcap is None and s_aux is None
    if documents.bounds_flash is not None and plain and _flash_can(query, value):
        return _flash(documents, (query, key, value), scale=scale, window=sliding_window), None
    out = torch.empty_like(query.transpose(1, 2))
    for start, stop in pairwise(documents.bounds):
        if start == stop:
            continue
        q, k, v = (tensor[:, :, start:stop] for tensor in (query, key, value))
        narrow = sliding_window is not None and sliding_window < stop - start
        if plain and not narrow:
            repeats = q.shape[1] // k.shape[1]
            k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
            one = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            allowed = causal_mask(stop - start, sliding_window, query.device)
            one = exact_attention(
                q, k, v, allowed=allowed, scale=scale, softcap=softcap, sinks=s_aux
            )
        out[:, start:stop] = one.transpose(1, 2)
    return out, None


def require_window(module: nn.Module, sliding_window: int | None) -> None:
    """Refuse a sliding layer that keeps its window to itself: it would read too far."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if kinds and layer is not None and kinds[layer] == "sliding_attention" and not sliding_window:
        raise ConfigError(
            f"layer {layer} of the target slides, but {type(module).__name__} does not say how far"
        )


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [length, length]; True means the query (row) may read the key (column)."""
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    allowed = column <= row
    return allowed if window is None else allowed & (column > row - window)


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend by the formula, softmax in fp32, every key head serving its group of query heads.

    Args:
        query: [R, H, n, E].
        key: [R, G, m, E].
        value: [R, G, m, E].
        allowed: bool, broadcastable to [R, G, H/G, n, m]; each query may read at least one key.
        scale: of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: one extra score a head, whose share of the softmax is dropped.

    Returns:
        [R, H, n, E].
    """
    rows, heads, n, width = query.shape
    groups = key.shape[1]
    grouped = query.reshape(rows, groups, heads // groups * n, width)
    scores = (grouped @ key.transpose(-1, -2)).view(rows, groups, heads // groups, n, -1).float()
    scores = scores * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, groups, heads // groups, 1, 1).expand(*scores.shape[:-1], 1)
        shares = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        shares = scores.softmax(dim=-1)
    shares = shares.to(value.dtype).view(rows, groups, heads // groups * n, -1)
    return (shares @ value).view(rows, heads, n, width)


def _flash_can(query: Tensor, value: Tensor) -> bool:
    width = query.shape[-1]
    return (
        query.dtype in {torch.bfloat16, torch.float16}
        and width == value.shape[-1] <= FLASH_MAX_HEAD_DIM
        and width % FLASH_HEAD_DIM_MULTIPLE == 0
    )


def _flash(
    documents: Documents, heads: tuple[Tensor, ...], *, scale: float, window: int | None
) -> Tensor:
    """Call the kernel under ``torch.nn.attention.varlen``, whose own signature changes yearly."""
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in heads)
    out: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        query,
        key,
        value,
        documents.bounds_flash,
        documents.bounds_flash,
        documents.longest,
        documents.longest,
        0.0,
        window is None,  # causal; with a window, (window - 1, 0) says so
        return_debug_mask=False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if window is not None else -1,
    )[0]
    return out[None]
