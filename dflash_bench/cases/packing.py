"""Packing 50,000 documents into batches of T, on the host: one timed step packs one epoch.

``best-fit`` is what runs use; ``in-order`` lays documents end to end as they come and opens a new
batch where the next one does not fit, which is what it is worth its time against.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.data.packing import MIN_PIECE_TOKENS, Packing
from dflash_bench.cases import MODES
from dflash_bench.cases._case import Case, Found, Setting
from dflash_bench.cases._repeated import Repeated, Run, Work

NUM_DOCUMENTS = 50_000
SPREAD = 0.8
"""Of the logarithm of varying lengths: conversations and source files are about so uneven."""


def document_lengths(setting: Setting) -> NDArray[np.int64]:
    """Lengths with the shape's mean, as it is or by a log-normal law that is cut off at T."""
    shape = setting.shape
    mean = shape.token_budget / shape.num_documents
    if setting.lengths == "fixed":
        return np.full(NUM_DOCUMENTS, int(mean), dtype=np.int64)
    random = np.random.default_rng(setting.seed)
    drawn = random.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, NUM_DOCUMENTS)
    return drawn.clip(MIN_PIECE_TOKENS, shape.token_budget).astype(np.int64)


def pack_in_order(lengths: NDArray[np.int64], token_budget: int) -> int:
    """Return the number of batches that documents fill in the order in which they come."""
    num_batches, left = 0, 0
    for length in lengths.tolist():
        if length > left:
            num_batches, left = num_batches + 1, token_budget
        left -= length
    return num_batches


def make_work(setting: Setting) -> Work:
    """Pack the same documents once a step, every time in another order."""
    lengths, token_budget = document_lengths(setting), setting.shape.token_budget
    batches: list[int] = []
    pack = _in_order if setting.mode == "in-order" else _best_fit

    def finish() -> Found:
        mean = sum(batches) / len(batches)
        return {
            "more": {
                "batches": mean,
                "documents a batch": len(lengths) / mean,
                "fill": float(lengths.sum()) / (mean * token_budget),
            }
        }

    def make_ready() -> Run:
        step = pack(lengths, setting)
        return lambda number: batches.append(step(number))

    return Work(
        make_ready=make_ready,
        device=torch.device("cpu"),
        units=lambda _number: float(len(lengths)),
        finish=finish,
    )


def _best_fit(lengths: NDArray[np.int64], setting: Setting) -> Callable[[int], int]:
    packing = Packing(lengths, token_budget=setting.shape.token_budget, seed=setting.seed)
    return packing.batches_per_epoch  # packs each epoch when it is first asked for


def _in_order(lengths: NDArray[np.int64], setting: Setting) -> Callable[[int], int]:
    random = np.random.default_rng(setting.seed)
    return lambda _number: pack_in_order(
        lengths[random.permutation(len(lengths))], setting.shape.token_budget
    )


def on_the_host(_setting: Setting) -> tuple[str, ...]:
    """Where everybody packs."""
    return ("cpu",)


def make_subject(setting: Setting) -> Repeated:
    """Return the subject of one process."""
    return Repeated(setting, make_work)


CASE = Case(
    name="packing",
    help=f"{NUM_DOCUMENTS:,} documents packed into batches, on the host",
    make=make_subject,
    modes=MODES["packing"],
    unit="document",
    devices=on_the_host,
)
