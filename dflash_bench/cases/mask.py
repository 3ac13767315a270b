"""The block mask of one batch: tile tables from anchors, then the ``BlockMask`` around them.

Launched from Python, compiled, and inside captured graphs of either. 8192 block tokens x 11,264
keys at shape ``qwen3-8b-3072``.
"""

from collections.abc import Callable

import torch

from dflash.drafter.anchors import Anchors, anchor_scores, draw_anchors
from dflash.drafter.masks import MaskTables, block_mask_from, mask_tables
from dflash.execution import capture, on_stream
from dflash_bench.cases import MODES
from dflash_bench.cases._case import Case, Found, Setting, first_device
from dflash_bench.cases._repeated import Repeated, Run, Work
from dflash_bench.documents import document_bounds, places
from dflash_bench.shapes import BenchShape

CALLS = 20
"""In one reading of the clock; a single call is too short for one."""


def batch_anchors(setting: Setting, device: torch.device) -> tuple[Anchors, torch.Tensor]:
    """Return the anchors of batch 0 and starts_T, the row at which each document starts."""
    shape = setting.shape
    bounds = document_bounds(shape, setting.lengths, 0, seed=setting.seed)
    documents_T, positions_T = (one.to(device) for one in places(bounds, shape.token_budget))
    anchors = draw_anchors(
        documents_T >= 0,
        documents_T,
        positions_T,
        scores_T=anchor_scores(setting.seed, 0, num_positions=shape.token_budget, device=device),
        num_anchors=shape.num_anchors,
    )
    return anchors, torch.arange(shape.token_budget, device=device) - positions_T


def make_work(setting: Setting) -> Work:
    """Make one mask again and again, in the form that the mode names."""
    device, shape = torch.device(setting.devices[0]), setting.shape
    anchors, starts_T = batch_anchors(setting, device)
    function = torch.compile(mask_tables, dynamic=False) if "compiled" in setting.mode else None
    made: list[MaskTables] = []

    def tables() -> MaskTables:
        return (function or mask_tables)(anchors, starts_T, block_size=shape.drafter.block_size)

    def make() -> None:
        made[:] = [tables()]
        block_mask_from(
            made[0], num_context=shape.token_budget, block_size=shape.drafter.block_size
        )

    def finish() -> Found:
        wanted = mask_tables(anchors, starts_T, block_size=shape.drafter.block_size)
        return {"more": facts(shape, made[0], wanted)}

    return Work(
        make_ready=lambda: _ready(make, setting.mode, device),
        device=device,
        units=lambda _number: 1.0,
        calls=CALLS,
        padded=setting.lengths == "variable",
        finish=finish,
    )


def facts(shape: BenchShape, made: MaskTables, wanted: MaskTables) -> dict[str, object]:
    """How large the mask is, how many of its tiles are visited, and whether it is the right one."""
    rows, columns = made.partial_tiles_IJ.shape[-2:]
    visited = int(made.partial_counts_I.sum() + made.full_counts_I.sum())
    slots = shape.num_anchors * shape.drafter.block_size
    return {
        "block tokens": slots,
        "keys": shape.token_budget + slots,
        "tiles visited": visited / (rows * columns),
        "as launched": all(map(torch.equal, made, wanted)),
    }


def _ready(make: Callable[[], None], mode: str, device: torch.device) -> Run:
    if "captured" not in mode:
        make()
        return lambda _number: make()
    stream = torch.cuda.Stream(device)
    with on_stream(stream):
        for _ in range(2):
            make()
    graph = capture(make, device=device, stream=stream, what="the block mask")
    return lambda _number: graph.replay()


def why_not(setting: Setting) -> str:
    """Only a GPU captures."""
    if "captured" in setting.mode and setting.devices[0] == "cpu":
        return "captured graphs need a CUDA device"
    return ""


def make_subject(setting: Setting) -> Repeated:
    """Return the subject of one process."""
    return Repeated(setting, make_work)


CASE = Case(
    name="mask",
    help="the block mask of one batch, made analytically",
    make=make_subject,
    devices=first_device,
    modes=MODES["mask"],
    unit="mask",
    why_not=why_not,
)
