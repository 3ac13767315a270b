"""The target's forward over one packed batch: the features that a drafter trains on.

``stopped-packed`` is what runs do: no layer after the last tap, no LM head, and attention that
visits each document by itself. ``whole`` runs all layers and the LM head, as transformers does;
``dense`` attends through a mask of T x T.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dflash.decode.eager import tap_into
from dflash.target.model import Target
from dflash.target.packed import PACKED, attend_within
from dflash.target.sharing import decoder_layers, sharing_copy
from dflash_bench.cases import MODES
from dflash_bench.cases._case import Case, Found, Setting, target_device
from dflash_bench.cases._repeated import Repeated, Run, Work
from dflash_bench.documents import document_bounds, places, with_padding
from dflash_bench.planned import dtype_on, target_gib
from dflash_bench.random_target import random_target

NUM_BATCHES = 4
"""That take turns, so that lengths vary from step to step."""

COMPARED_TOKENS = 2048
"""The last ones: they would show it if documents read each other."""

Features = Callable[["Batch"], Tensor]


class Batch:
    """Tokens, positions and bounds of one batch on the target's device; made once."""

    def __init__(self, setting: Setting, number: int) -> None:
        shape, device = setting.shape, torch.device(setting.target_device)
        bounds = document_bounds(shape, setting.lengths, number, seed=setting.seed)
        random = torch.Generator().manual_seed(setting.seed + number)
        tokens_T = torch.randint(
            0, shape.drafter.vocab_size, (shape.token_budget,), generator=random
        )
        documents_T, positions_T = places(bounds, shape.token_budget)
        self.num_real_tokens, self.num_documents = bounds[-1], len(bounds) - 1
        self.bounds = with_padding(bounds, shape.token_budget)
        self.tokens_T, self.documents_T, self.positions_T = (
            one.to(device) for one in (tokens_T, documents_T, positions_T)
        )

    def dense_mask(self) -> Tensor:
        """bool [1, 1, T, T]; True means the query (row) may read the key (column)."""
        row_T = torch.arange(len(self.tokens_T), device=self.tokens_T.device)
        same_TT = self.documents_T[:, None] == self.documents_T[None, :]
        return (same_TT & (row_T[:, None] >= row_T[None, :]))[None, None]


def make_work(setting: Setting) -> Work:
    """Run a target with random weights over a few batches in turn."""
    device = torch.device(setting.target_device)
    target = random_target(
        setting.shape, device=device, dtype=dtype_on(setting.target_device), seed=setting.seed
    )
    batches = [Batch(setting, number) for number in range(NUM_BATCHES)]
    features = features_function(target, setting.mode)

    def of(number: int) -> Batch:
        return batches[number % NUM_BATCHES]

    def make_ready() -> Run:
        features(of(0))
        return lambda number: features(of(number))

    def finish() -> Found:
        difference = relative_difference(
            features(of(1)), features_function(target, "stopped-packed")(of(1)), batch=of(1)
        )
        return {"more": {"documents": of(1).num_documents, "difference": difference}}

    return Work(
        make_ready=make_ready,
        device=device,
        units=lambda number: float(of(number).num_real_tokens),
        padded=setting.lengths == "variable",
        finish=finish,
    )


def features_function(target: Target, mode: str) -> Features:
    """Return what makes the features [T, C] of a batch in this *mode*."""
    if mode == "stopped-packed":
        return lambda batch: target.features(
            batch.tokens_T, batch.positions_T, batch.documents_T, cu_lengths=batch.bounds
        )
    stops, packs = mode.startswith("stopped"), mode.endswith("packed")
    model: Any = sharing_copy(target.model, attention=PACKED if packs else "sdpa")
    if stops:
        cut_after(model.get_decoder(), max(target.taps))
    outputs: dict[int, Tensor] = {}
    tap_into(model, target.taps, outputs)
    forward = model.get_decoder() if stops else model

    @torch.no_grad()
    def features(batch: Batch) -> Tensor:
        mask = {} if packs else {"attention_mask": batch.dense_mask()}
        within: AbstractContextManager[object] = (
            attend_within(batch.bounds, target.device) if packs else nullcontext()
        )
        with within:
            forward(
                input_ids=batch.tokens_T[None],
                position_ids=batch.positions_T[None],
                use_cache=False,
                **mask,
            )
        found = torch.cat([outputs[tap] for tap in target.taps], dim=-1)
        outputs.clear()
        return found

    return features


def cut_after(decoder: Any, last: int) -> None:  # noqa: ANN401 (a transformers model)
    """Leave the layers up to *last* and no final norm."""
    name, layers = decoder_layers(decoder) or ("", nn.ModuleList())
    setattr(decoder, name, layers[: last + 1])
    decoder.config.num_hidden_layers = last + 1
    decoder.norm = nn.Identity()


def relative_difference(one_TC: Tensor, other_TC: Tensor, *, batch: Batch) -> float:
    """Root mean square of the difference over that of *other*, on the last real tokens."""
    real = slice(max(0, batch.num_real_tokens - COMPARED_TOKENS), batch.num_real_tokens)
    gap = (one_TC[real].float() - other_TC[real].float()).square().mean().sqrt()
    return float(gap / other_TC[real].float().square().mean().sqrt())


def forward_flop(setting: Setting) -> float:
    """Products of the layers up to the last tap, and causal attention within documents."""
    shape = setting.shape
    drafter, num_layers = shape.drafter, max(shape.drafter.target_layer_ids) + 1
    queries, keys = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    width = drafter.hidden_size
    layer = 2 * width * (queries + keys) + 3 * width * drafter.intermediate_size
    bounds = document_bounds(shape, "fixed", 0, seed=0)
    pairs = sum((stop - start) * (stop - start + 1) / 2 for start, stop in pairwise(bounds))
    return num_layers * (2.0 * shape.token_budget * layer + 2 * 2 * queries * pairs)


def make_subject(setting: Setting) -> Repeated:
    """Return the subject of one process."""
    return Repeated(setting, make_work)


CASE = Case(
    name="target-forward",
    help="the frozen target's features of one packed batch",
    make=make_subject,
    modes=MODES["target-forward"],
    devices=target_device,
    flop=forward_flop,
    planned_gib=target_gib,
)
