"""The block mask of one batch: tile tables from anchors, then the ``BlockMask`` around them.

``python -m dflash_bench.block_mask --shape qwen3-8b-3072`` times it launched from Python, compiled,
and inside captured graphs of either; 8192 block tokens x 11,264 keys at that shape.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dflash.drafter.anchors import anchor_scores, draw_anchors
from dflash.drafter.masks import block_mask_from, mask_tables
from dflash.execution.graphs import capture
from dflash_bench.machine import machine_facts, say, write_json
from dflash_bench.shapes import SHAPES, BenchShape
from dflash_bench.steps import random_inputs
from dflash_bench.timing import time_steps

Form = Literal["launched", "compiled", "captured", "captured compiled"]
FORMS: tuple[Form, ...] = get_args(Form)
CALLS = 20
"""In one reading of the clock; a single call is too short for one."""


def make_form(form: Form, shape: BenchShape, *, device: torch.device) -> Callable[[], object]:
    """Return a call that makes the mask of one batch once, in this *form*, ready to be timed."""
    inputs = random_inputs(
        shape, device=device, dtype=torch.bfloat16, generator=torch.Generator(device).manual_seed(0)
    )
    anchors = draw_anchors(
        inputs.loss_mask_T,
        inputs.documents_T,
        inputs.positions_T,
        scores_T=anchor_scores(0, 0, num_positions=shape.token_budget, device=device),
        num_anchors=shape.num_anchors,
    )
    row_T = torch.arange(shape.token_budget, device=device)
    starts_T = row_T - inputs.positions_T
    tables = torch.compile(mask_tables, dynamic=False) if "compiled" in form else mask_tables
    block_size = shape.drafter.block_size

    def make() -> object:
        return block_mask_from(
            tables(anchors, starts_T, block_size=block_size),
            num_context=shape.token_budget,
            block_size=block_size,
        )

    if "captured" not in form:
        return make
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            make()
    return capture(make, device=device, stream=stream, what="the block mask").replay


def measure(form: Form, shape: BenchShape, *, device: torch.device, repeats: int) -> dict[str, Any]:
    """Time one form, or say why it cannot be had."""
    if "captured" in form and device.type != "cuda":
        return {"form": form, "skipped": "captured graphs need a CUDA device"}
    call = make_form(form, shape, device=device)

    def calls(_number: int) -> None:
        for _ in range(CALLS):
            call()

    calls(0)
    times_ms = [time_ms / CALLS for time_ms in time_steps(calls, repeats, device)]
    deciles = statistics.quantiles(times_ms, n=10)
    return {
        "form": form,
        "ms_median": statistics.median(times_ms),
        "ms_p10": deciles[0],
        "ms_p90": deciles[-1],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--form", action="append", choices=FORMS, help="repeatable; all")
    parser.add_argument("--repeats", type=int, default=100, help=f"readings of {CALLS} calls each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for everything that was found")
    given = parser.parse_args(arguments)
    device, shape = torch.device(given.device), SHAPES[given.shape]
    one = partial(measure, shape=shape, device=device, repeats=given.repeats)
    rows = []
    for form in given.form or FORMS:
        say(form)
        rows.append(one(form))
    slots = shape.num_anchors * shape.drafter.block_size
    found = {
        **machine_facts(
            device,
            case="block_mask",
            arguments=sys.argv[1:] if arguments is None else arguments,
        ),
        "shape": given.shape,
        "block_tokens": slots,
        "keys": shape.token_budget + slots,
        "forms": rows,
    }
    write_json(found, given.json)
    print(f"block mask, {slots} block tokens x {found['keys']} keys, on {found['device']}")
    for row in rows:
        figures = row.get("skipped") or (
            f"{row['ms_median']:.4f} ms, p10 {row['ms_p10']:.4f}, p90 {row['ms_p90']:.4f}"
        )
        print(f"{row['form']:<18} {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
