"""Drafters of one process, each in a thread of its own, as a run has them, on given features."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from dflash.drafter.training import StepInputs
from dflash.execution import SEALABLE, Mode, Program, Runner, on_stream, process_seal
from dflash.execution.compiling import first_compile
from dflash.pipeline.lifeline import Halted, Lifeline
from dflash.train.devices import choose_sum
from dflash.train.replicas import GradientSum
from dflash.train.step import TrainStep
from dflash.train.totals import averages
from dflash_bench.cases._case import Setting
from dflash_bench.lengths import batch_lengths, length_of_step
from dflash_bench.steps import make_step, make_tables
from dflash_bench.timing import time_steps

Part = Literal["normal", "metric"]
Result = TypeVar("Result")
LR = 1e-5
"""Low, so that steps on one random batch hardly learn it: at 1e-4 the first eight steps of the 8B
shape had a mean loss of 8.5, from ln V = 11.9, and eager and compiled steps were 1.3 % apart."""

PADDED: tuple[Mode, ...] = ("warmed", "graphed")
"""Modes that know one shape, so that the feed pads every batch to T."""


class _AsTheyCome:
    """A step that gets other tensors with every batch, and so has no inputs that stay."""

    inputs: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, step: TrainStep) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a program has
        return getattr(self._step, name)


class Drafter:
    """One drafter: its step, what runs it, its thread."""

    def __init__(self, step: TrainStep, setting: Setting, *, number: int) -> None:
        self.step = step
        self.setting = setting
        self.number = number
        self.steps_made = 0
        self._place = 0
        varies = setting.lengths == "variable"
        self.whole = StepInputs(*(t.clone() for t in step.batch)) if varies else step.batch
        """A batch of T real tokens, from which the others are cut where lengths vary."""
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"drafter-{number}")
        program = cast("Program", _AsTheyCome(step)) if self.naive else step
        self.runner = Runner(program, _mode(setting), unsafe=True)
        self.lengths = lengths_of(setting)
        pads = setting.lengths == "variable" and not self.naive
        self._padded = {length: self._pad(length) for length in self.lengths} if pads else {}

    @property
    def naive(self) -> bool:
        """Whether batches come as long as they are."""
        return is_naive(self.setting)

    def feed(self, *, longest: bool) -> None:
        """Give the step its next batch, as production does or, where it is naive, as it comes.

        *longest* has T tokens, and the order of lengths goes on after it as if it had not been.
        """
        number = self.steps_made
        self.steps_made += 1
        if self.setting.lengths == "fixed":
            self.step.batch.batch_number.fill_(number)
            return
        length = length_of_step(self._place, self.lengths, seed=self.setting.seed)
        if longest:
            length = self.lengths[-1]
        else:
            self._place += 1
        if self.naive:
            cut = (tensor[:length].clone() if tensor.ndim else tensor for tensor in self.whole)
            self.step.batch = StepInputs(*cut)._replace(
                batch_number=torch.full_like(self.whole.batch_number, number)
            )
        else:
            batch = self._padded[length]
            batch["batch_number"].fill_(number)
            self.runner.feed(batch)

    def _pad(self, length: int) -> dict[str, Tensor]:
        """The same batch padded to T; what stands in padding is read by nobody."""
        batch = self.whole
        real_T = torch.arange(len(batch.tokens_T), device=self.step.device) < length
        return batch._replace(
            documents_T=torch.where(real_T, batch.documents_T, -1),
            positions_T=torch.where(real_T, batch.positions_T, 0),
            loss_mask_T=batch.loss_mask_T & real_T,
        )._asdict()


class Drafters:
    """All drafters of a process; the first is the one that is timed.

    Several sum their gradients, as in a run, and do so also where their threads are known to die:
    that is what is then seen.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        tables = {
            name: make_tables(setting.shape, device=torch.device(name), seed=setting.seed)
            for name in dict.fromkeys(setting.devices)
        }
        steps = [
            make_step(
                setting.shape,
                device=torch.device(name),
                seed=setting.seed,
                matmul=setting.matmul,
                tables=tables[name],
                data_seed=number,
            )
            for number, name in enumerate(setting.devices)
        ]
        self._life = Lifeline()
        self.all = [Drafter(step, setting, number=n) for n, step in enumerate(steps)]
        self.first = self.all[0]
        self._sum = GradientSum(
            steps,
            choose_sum("auto", setting.devices),
            streams=[drafter.runner.stream for drafter in self.all],
        )

    def warm_up(self) -> float | None:
        """Make everything ready, as a run does, or as little as a naive program does.

        Returns:
            seconds that compiling modes took to warm up; None where nothing is warmed up.
        """
        if len(self.all) > 1:
            self._sum.warm_up()
        if self.first.naive:
            first_compile()
        else:
            for drafter in self.all:
                drafter.runner.warm_up()
        for drafter in self.all:
            self._in_threads([drafter], lambda one: one.runner.enter_worker())
        if _mode(self.setting) in SEALABLE and not self.first.naive:
            process_seal().close()
        return None if self.first.naive else sum(d.runner.report.warm_up_s for d in self.all)

    def steps(
        self, num: int, *, lead_in: int = 0, part: Part = "normal", bare: bool = False
    ) -> list[float]:
        """Let every drafter make *num* steps after *lead_in* others; milliseconds of the first's.

        *bare* reads the clock before the first and after the last only, and gives their mean.
        """

        def make(drafter: Drafter) -> list[float]:
            device = drafter.step.device
            one = partial(self._one_step, drafter, part)
            if bare:
                _repeat(partial(one, longest=True), lead_in)
                return [time_steps(lambda _: _repeat(one, num), 1, device)[0] / num]
            times_ms = time_steps(lambda n: one(longest=n < lead_in), lead_in + num, device)
            return times_ms[lead_in:]

        return self._in_threads(self.all, make)[0]

    def loss(self) -> float | None:
        """The first drafter's average since this was asked last; all of its steps are over."""

        def read(drafter: Drafter) -> float | None:
            found = averages(drafter.step.totals.sums.cpu()).loss
            drafter.step.totals.zero()
            return found

        return self._in_threads([self.first], read)[0]

    def units(self, numbers: Iterable[int]) -> list[float]:
        """Real tokens of all drafters in steps of these places in the order of lengths."""
        seed, lengths = self.setting.seed, self.first.lengths
        each = (length_of_step(number, lengths, seed=seed) for number in numbers)
        return [float(len(self.all) * length) for length in each]

    def _one_step(self, drafter: Drafter, part: Part, *, longest: bool = False) -> None:
        drafter.feed(longest=longest)
        drafter.runner(part)
        if len(self.all) > 1:
            self._sum(drafter.number, [], self._life)
        drafter.step.set_lr(LR)
        drafter.runner("update")

    def _in_threads(
        self, drafters: list[Drafter], body: Callable[[Drafter], Result]
    ) -> list[Result]:
        """Run *body* in the thread and on the stream of each; raise what ended the first to end."""

        def guarded(drafter: Drafter) -> Result:
            try:
                with on_stream(drafter.runner.stream):
                    return body(drafter)
            except BaseException as error:
                if not isinstance(error, Halted):  # who waited for the one that failed
                    self._life.fail(f"drafter-{drafter.number}", error)
                raise

        futures = [drafter.thread.submit(guarded, drafter) for drafter in drafters]
        wait(futures)
        if self._life.failure is not None:
            raise self._life.failure[1]
        return [future.result() for future in futures]


def lengths_of(setting: Setting) -> tuple[int, ...]:
    """The lengths of batches in real tokens; T alone where they do not vary."""
    if setting.lengths == "fixed":
        return (setting.shape.token_budget,)
    return batch_lengths(setting.shape.token_budget, on_gpu=setting.devices[0] != "cpu")


def is_naive(setting: Setting) -> bool:
    """Whether batches of varying lengths reach the step as they are."""
    return setting.lengths == "variable" and setting.mode not in PADDED


def _mode(setting: Setting) -> Mode:
    return setting.mode  # type: ignore[return-value]


def _repeat(call: Callable[[], object], num: int) -> None:
    for _ in range(num):
        call()
