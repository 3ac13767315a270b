"""Cost curves: one size of a shape swept, its exponent, and the memory plan beside the peaks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dflash.measurement import Bench, Estimate, Row, Scaling
from dflash.train.fit import OUTSIDE_BYTES
from dflash.train.memory import GIB
from dflash_bench.cases import all_cases
from dflash_bench.cases._case import Lengths
from dflash_bench.session import BenchPlan, run_bench, setting_of, settled_devices
from dflash_bench.shape_rules import MOST_DRAFTERS, step_of
from dflash_bench.shapes import BenchShape
from dflash_bench.statistics import fit_exponent
from dflash_bench.swept import Over, check_values, swept_shape

MIN_POINTS = 3
"""Of an exponent: two points lie on any line."""

FARTHEST = {"token_budget": 2**21, "num_anchors": 2**18, "drafters": MOST_DRAFTERS}
"""How far a wall is looked for; documents take no memory."""


def run_scaling(
    plan: BenchPlan, over: Over, values: Sequence[int], *, say: Callable[[str], None]
) -> Bench:
    """Measure every shape of *plan* at every one of *values*; a curve for each mode.

    Raises:
        UsageError: a value that a shape cannot have; else what ``run_bench`` raises.
    """
    for shape in plan.shapes:
        check_values(shape, over, values)
    found = run_bench(*_plans(plan, over, values), say=say)
    curves = [
        curve
        for shape in plan.shapes
        for curve in _curves(plan, shape, over=over, values=values, bench=found)
    ]
    options = {**found.options, "over": over, "values": list(values)}
    return found.model_copy(update={"scaling": curves, "options": options})


def _plans(plan: BenchPlan, over: Over, values: Sequence[int]) -> Iterator[BenchPlan]:
    """One of all shapes, or one for each number of drafters."""
    if over != "drafters":
        shapes = tuple(swept_shape(s, over, value) for s in plan.shapes for value in values)
        yield replace(plan, shapes=shapes)
        return
    for value in values:
        shapes = tuple(swept_shape(shape, over, value) for shape in plan.shapes)
        yield replace(plan, shapes=shapes, drafters=value)


def _curves(
    plan: BenchPlan, shape: BenchShape, *, over: Over, values: Sequence[int], bench: Bench
) -> Iterator[Scaling]:
    for case in plan.cases:
        for lengths in plan.lengths:
            modes = [
                row.mode
                for row in bench.rows
                if (row.case, row.lengths) == (case, lengths)
                and row.shape == swept_shape(shape, over, values[0]).name
            ]
            for mode in dict.fromkeys(modes):
                sweep = _Sweep(plan, shape, over=over, case=case, mode=mode, lengths=lengths)
                yield sweep.curve(values, bench)


class _Sweep:
    """One case in one mode along the values."""

    def __init__(
        self,
        plan: BenchPlan,
        shape: BenchShape,
        *,
        over: Over,
        case: str,
        mode: str,
        lengths: Lengths,
    ) -> None:
        self.plan = plan
        self.shape = shape
        self.over = over
        self.case = all_cases()[case]
        self.mode = mode
        self.lengths = lengths

    def curve(self, values: Sequence[int], bench: Bench) -> Scaling:
        """What was measured at each value that has a row, beside what was planned."""
        rows = {row.shape: row for row in bench.rows if self._is_mine(row)}
        names = {value: swept_shape(self.shape, self.over, value).name for value in values}
        there = [value for value in values if names[value] in rows]
        points = [rows[names[value]] for value in there]
        step_ms = [None if row.step_ms is None else row.step_ms.median for row in points]
        return Scaling(
            over=self.over,
            values=[float(value) for value in there],
            rows=[row.name for row in points],
            step_ms=step_ms,
            exponent=exponent(there, step_ms),
            peak_gib=[
                None if row.memory is None else row.memory.peak_allocated_gib for row in points
            ],
            planned_gib=[self.planned_gib(value) for value in there],
            wall=self._wall(bench),
        )

    def planned_gib(self, value: int) -> float | None:
        """The prediction of the memory plan, on the first drafter's device."""
        number = value if self.over == "drafters" else self.plan.drafters
        setting = setting_of(
            self.plan,
            self.case,
            shape=swept_shape(self.shape, self.over, value),
            lengths=self.lengths,
            devices=settled_devices(replace(self.plan, drafters=number)),
        )
        return self.case.planned_gib(replace(setting, mode=self.mode))

    def _wall(self, bench: Bench) -> float | None:
        """The first value that the plan says is too big, of all that there could be."""
        room_gib = _room_gib(bench)
        on_gpu = settled_devices(self.plan)[0] != "cpu"
        if room_gib is None or self.over not in FARTHEST or not on_gpu:
            return None
        step = step_of(self.over, block_size=self.shape.drafter.block_size)

        def fits(number: int) -> bool:
            planned = self.planned_gib(number * step)
            return planned is None or planned + OUTSIDE_BYTES / GIB <= room_gib

        farthest = FARTHEST[self.over]
        if self.over == "num_anchors":
            farthest = min(farthest, self.shape.token_budget)  # more than tokens there cannot be
        low, high = 0, farthest // step
        if fits(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return float(high * step)

    def _is_mine(self, row: Row) -> bool:
        mine = (self.case.name, self.mode, self.lengths)
        return (row.case, row.mode, row.lengths) == mine


def exponent(values: Sequence[int], step_ms: Sequence[float | None]) -> Estimate | None:
    """Fit step time ~ value ** exponent; None below three measured points."""
    points = [(v, ms) for v, ms in zip(values, step_ms, strict=True) if ms is not None]
    if len(points) < MIN_POINTS:
        return None
    return fit_exponent([float(value) for value, _ in points], [ms for _, ms in points])


def _room_gib(bench: Bench) -> float | None:
    """The memory of the GPU that was measured; of the smallest where its name says nothing."""
    gpus = bench.environment.gpus
    measured = [gpu.memory_gib for gpu in gpus if gpu.name == bench.device]
    return min(measured or [gpu.memory_gib for gpu in gpus], default=None)
