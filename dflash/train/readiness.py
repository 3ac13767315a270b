"""Warming a run up: targets and steps on its first batch, in a mode that was tried, then sealed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from dflash.execution import SEALABLE, Ready, make_ready, process_seal
from dflash.pipeline.gate import Opening
from dflash.train.build import Built

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WarmRun:
    """A run whose runners are warm; ``built`` knows the mode that it came to."""

    built: Built
    ready: Ready
    batch_number: int

    @property
    def warm_up_s(self) -> float:
        """Seconds that the drafters' warm-up took, all of them together."""
        return sum(runner.report.warm_up_s for runner in self.ready.runners)

    def opening(
        self,
        *,
        first: Callable[[], None] = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> Opening:
        """What the pipeline does before it starts: every worker enters, and the process is sealed.

        The targets run once more, each in its own thread: capturing has emptied the allocator's
        cache, and a thread has a cuBLAS workspace of its own, so that they have their memory before
        allocations are counted. *first* does what else needs memory then.
        """
        built, mode = self.built, self.built.devices.mode.mode

        def seal() -> None:
            first()
            if mode in SEALABLE:
                process_seal().close()
            then()

        return Opening(
            enter=[runner.enter_worker for runner in self.ready.runners],
            prime=[
                partial(built.pipeline.prime_lane, lane, built.assemble, self.batch_number)
                for lane in built.pipeline.lanes
            ],
            then=seal,
        )


def warm_up(built: Built, *, batch_number: int, unsafe: bool, say: Say) -> WarmRun:
    """Run targets and steps on batch *batch_number*, which leaves no trace in any weight.

    Raises:
        CaptureError: the mode that was asked for cannot capture a step.
        NumericsError: what it captured gives other numbers.
    """
    built.pipeline.prime(built.assemble, batch_number)
    for step, slots in zip(built.steps, built.pipeline.slots, strict=True):
        for name, tensor in slots[0].inputs._asdict().items():
            step.inputs[name].copy_(tensor)
    ready = make_ready(
        built.steps,
        built.devices.mode,
        streams=built.pipeline.streams,
        unsafe=unsafe,
        say=say,
    )
    settled = replace(built, devices=replace(built.devices, mode=ready.choice))
    return WarmRun(settled, ready, batch_number)
