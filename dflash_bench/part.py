"""One case at one shape with one kind of lengths: its modes in processes that take turns."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from dflash.measurement import Comparison, Estimate, Row, Verdict
from dflash_bench.cases._case import Case, Setting
from dflash_bench.child import Child, state_of
from dflash_bench.grouping import CONTEXT_GIB, ON_CPU, ON_GPU, Grouping, group_modes
from dflash_bench.overhead import overhead_share
from dflash_bench.own_process import Numbered
from dflash_bench.rows import Beside, has_a_rate, row_name, row_of, skipped_row
from dflash_bench.statistics import (
    LOOKS,
    MIN_PAIRS,
    Turns,
    compare_turns,
    is_enough,
    is_repeatable,
    slow_steps_count,
)
from dflash_bench.timing import MatrixProduct, matrix_tflops
from dflash_bench.turns import keep_what_is_known, make_ready, take_turns
from dflash_bench.weather import Watch

PRODUCT = "matrix product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a part may go on.

    Attributes:
        precision: relative, of every comparison, at which no more turns are taken.
        max_time_s: of taking turns.
        min_pairs: turns that every mode takes in any case.
        limit_s: an answer that takes longer is a hang.
    """

    precision: float
    max_time_s: float
    min_pairs: int
    limit_s: float


@dataclass(slots=True)
class _Pairing:
    """Turns of a child that have the baseline's turns from *begin* on beside them."""

    child: Child
    begin: int
    count: int = 0


@dataclass(slots=True, kw_only=True)
class Part:
    """``run`` measures; whatever ends it, ``rows`` and ``comparisons`` tell what there is by then.

    Attributes:
        settings: by mode, the default baseline first.
        reasons: modes that are not measured, and why; found by ``run``.
        finds_overhead: also find out what measuring costs, if the case can.
    """

    case: Case
    settings: Mapping[str, Setting]
    limits: Limits
    watch: Watch
    say: Callable[[str], None]
    reasons: dict[str, str] = field(default_factory=dict)
    finds_overhead: bool = False
    overhead_share: Estimate | None = None
    _finished: set[str] = field(default_factory=set)
    _notes: dict[str, str] = field(default_factory=dict)
    _children: dict[str, Child] = field(default_factory=dict)
    _started: dict[str, Child] = field(default_factory=dict)
    _crowded: list[Child] = field(default_factory=list)
    _pairings: dict[str, _Pairing] = field(default_factory=dict)
    _grouping: Grouping = field(default_factory=Grouping)

    def run(self) -> None:
        """Measure every mode that can be measured here."""
        for mode, setting in self.settings.items():
            if why := self.case.why_not(setting):
                self.reasons[mode] = why
        wanted = {mode: one for mode, one in self.settings.items() if mode not in self.reasons}
        if not wanted:
            return
        self._group(wanted)
        grouping = self._grouping
        groups = [*grouping.together, *([mode] for mode in grouping.alone)]
        share_s = self.limits.max_time_s / max(1, sum(len(group) for group in groups))
        with ExitStack() as stack, self._asking_when_interrupted():
            for number, group in enumerate(groups):
                paired = group in grouping.together
                if not paired:
                    self._finish([grouping.baseline])
                following = groups[number + 1][0] if number + 1 < len(groups) else ""
                self._measure(stack, group, paired=paired, share_s=share_s, following=following)
            self._finish([grouping.baseline])
            for mode in self._crowded_out(grouping):
                self._measure(stack, [mode], paired=False, share_s=share_s)
            self._finish([PRODUCT])

    def _crowded_out(self, grouping: Grouping) -> list[str]:
        """Modes that ran out of memory beside others, to be measured anew by themselves.

        Nothing is compared with a baseline that did: it has no turns beside theirs.
        """
        baseline, found = grouping.baseline, []
        beside = [mode for group in grouping.together for mode in group]
        for mode in [baseline, *beside] if beside else []:
            failure = self._children[mode].failure
            if failure is None or not failure.out_of_memory:
                continue
            others = "others" if mode == baseline else baseline
            self._notes[mode] = f"it ran out of memory beside {others}, so it was measured alone"
            if mode == baseline:
                self._notes[mode] += " and nothing is compared with it"
                self._pairings.clear()
            self._pairings.pop(mode, None)
            self._finished.discard(mode)
            self._crowded.append(self._children.pop(mode))
            self._crowded[-1].close()  # its end may take seconds, in which it holds what it has
            found.append(mode)
        return found

    def rows(self) -> list[Row]:
        """A row for every mode, in their order."""
        tflops, rows = self.matrix_tflops, []
        verdicts = {one.row: one.verdict for one in self.comparisons()}
        for mode, setting in self.settings.items():
            child = self._children.get(mode)
            if child is None:
                why = self.reasons.get(mode, "interrupted before it was measured")
                rows.append(skipped_row(self.case, setting, why))
                continue
            beside = Beside(
                matrix_tflops=tflops,
                baseline=self._children.get(self._grouping.baseline),
                eager=self._children.get("eager"),
                process_gib=self.watch.process_gib(child.facts.get("gpu_process")),
                note=self._notes.get(mode, ""),
                verdict=verdicts.get(row_name(self.case, setting)),
            )
            rows.append(row_of(self.case, setting, child, beside=beside))
        return rows

    def comparisons(self) -> list[Comparison]:
        """Every mode that took turns with the baseline against it."""
        baseline = self._children.get(self._grouping.baseline)
        names = {mode: row_name(self.case, one) for mode, one in self.settings.items()}
        found = []
        for mode, pairing in self._pairings.items():
            compared = self._compared(pairing, baseline)
            if compared is not None and baseline is not None:
                ratio, verdict = compared
                found.append(
                    Comparison(
                        row=names[mode],
                        baseline=names[self._grouping.baseline],
                        ratio=ratio,
                        pairs=pairing.count,
                        precision=self.limits.precision,
                        verdict=verdict,
                        slow_steps_count=slow_steps_count(*_turns_of(pairing, baseline)),
                    )
                )
        return found

    @property
    def matrix_tflops(self) -> float | None:
        """Of the product that took turns with the modes; None on a CPU, and before it did."""
        product = self._children.get(PRODUCT)
        if product is None or not product.turns:
            return None
        return matrix_tflops(product.turns)

    @property
    def processes(self) -> set[int]:
        """All of them, as NVML counts them."""
        children = [*self._children.values(), *self._crowded]
        return {child.facts["gpu_process"] for child in children if child.facts.get("gpu_process")}

    @property
    def _devices(self) -> tuple[str, ...]:
        return self.case.devices(next(iter(self.settings.values())))

    @property
    def _device(self) -> str:
        return self._devices[0]

    @contextmanager
    def _asking_when_interrupted(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.say("interrupted; asking what is known. Ctrl-C again ends it at once")
            keep_what_is_known(self._children.values())
            raise

    def _group(self, wanted: Mapping[str, Setting]) -> None:
        free, on_cpu = self.watch.free_gib(self._device), self._device == "cpu"
        room = free if free is None or on_cpu else free - CONTEXT_GIB  # the matrix product's
        needs = {mode: self.case.planned_gib(one) for mode, one in wanted.items()}
        self._grouping = group_modes(needs, room, beyond=ON_CPU if on_cpu else ON_GPU)
        for mode in self._grouping.too_large:
            self.reasons[mode] = (
                f"it needs {needs[mode]:.1f} GiB by the memory plan, and {self._device} has"
                f" {free:.1f} GiB free"
            )

    def _child(self, stack: ExitStack, name: str) -> Child:
        """One that may have started already, while others were made ready."""
        if name in self._started:
            return self._started.pop(name)
        product = partial(MatrixProduct, self._device)
        make = product if name == PRODUCT else partial(self.case.make, self.settings[name])
        numbered = Numbered(make, devices=self._devices, uuids=self.watch.uuids)
        return stack.enter_context(Child(name, numbered, limit_s=self.limits.limit_s))

    def _measure(
        self,
        stack: ExitStack,
        group: list[str],
        *,
        paired: bool,
        share_s: float,
        following: str = "",
    ) -> None:
        baseline = self._grouping.baseline if paired else ""
        product_name = "" if self._device == "cpu" else PRODUCT
        names = filter(None, [product_name, baseline, *group])
        new = {name: self._child(stack, name) for name in names if name not in self._children}
        self._children |= new
        if following:
            self._started[following] = self._child(stack, following)
        make_ready([*new.values()], say=self.say, following=self._started.get(following))
        members = [self._children[name] for name in group]
        beside = [self._children[baseline]] if baseline else []
        product = self._children.get(PRODUCT)
        turning = [*beside, *members, *([] if product is None else [product])]
        begin = len(beside[0].turns) if beside else 0
        if begin:
            beside[0].restart()  # its turns are paired with the group's, of the same batches
        pairings = {name: _Pairing(self._children[name], begin) for name in group}
        if beside:
            self._pairings |= pairings
        ends_at = time.monotonic() + share_s * max(1, len(group))

        def enough(number: int) -> bool:
            for pairing in pairings.values():
                pairing.count = len(pairing.child.turns)
            return self._enough(number, [*beside, *members], ends_at=ends_at)

        with self.watch.watching():
            take_turns(turning, enough=enough, say=self.say)
        if self.finds_overhead and self.overhead_share is None:
            self._measure_overhead([*members, *beside])
        self._finish(group)

    def _enough(self, number: int, children: list[Child], *, ends_at: float) -> bool:
        alive = [child for child in children if child.failure is None]
        if not alive:
            return True
        if number < self.limits.min_pairs or not all(map(has_a_rate, alive)):
            return False
        if time.monotonic() >= ends_at:
            return True
        if number not in LOOKS:
            return False
        precision = self.limits.precision
        if not all(is_repeatable(child.turns, precision=precision) for child in alive):
            return False
        baseline = self._children.get(self._grouping.baseline)
        pairings = [p for p in self._pairings.values() if p.child in alive]
        compared = [self._compared(pairing, baseline) for pairing in pairings]
        return all(one is None or is_enough(one[0], precision=precision) for one in compared)

    def _compared(
        self, pairing: _Pairing, baseline: Child | None
    ) -> tuple[Estimate, Verdict] | None:
        if baseline is None or baseline is pairing.child or pairing.child.failure is not None:
            return None
        ours, theirs = _turns_of(pairing, baseline)
        if baseline.failure is not None or min(len(ours), len(theirs)) < MIN_PAIRS:
            return None
        return compare_turns(ours, theirs, precision=self.limits.precision)

    def _measure_overhead(self, children: list[Child]) -> None:
        alive = [child for child in children if child.failure is None and child.turns]
        if alive and next(iter(self.settings.values())).lengths == "fixed":
            self.overhead_share = overhead_share(alive[0], self.watch, say=self.say)

    def _finish(self, names: list[str]) -> None:
        for name in names:
            child = self._children.get(name)
            if child is not None and child.failure is None and name not in self._finished:
                self._finished.add(name)
                child.finish()
                self.say(f"{name}: {state_of(child)}")


def _turns_of(pairing: _Pairing, baseline: Child) -> tuple[Turns, Turns]:
    begin, count = pairing.begin, pairing.count
    return pairing.child.turns[:count], baseline.turns[begin : begin + count]
