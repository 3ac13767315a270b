"""A clock for pytest-benchmark that goes by what a case's own process measured on its device."""

from dflash_bench.child import Child


class DeviceClock:
    """Seconds of all timed steps so far; stands still outside of them."""

    def __init__(self) -> None:
        self.__name__ = "device_clock"
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


device_clock = DeviceClock()


class TimedSteps:
    """Gives one timed step of *child* a call, and moves the clock by what it took.

    Steps come turn by turn; a turn ends when its device is done, so no call returns before that.
    """

    def __init__(self, child: Child, clock: DeviceClock = device_clock) -> None:
        self._child = child
        self._clock = clock
        self._left: list[float] = []

    def __call__(self) -> None:
        """Make a step.

        Raises:
            RuntimeError: the child has failed, in its own words.
        """
        while not self._left:
            before = len(self._child.turns)
            self._child.turn()
            if self._child.failure is not None:
                failure = self._child.failure
                raise RuntimeError(f"{failure.type} during {failure.during}: {failure.message}")
            self._left = [time_ms for turn in self._child.turns[before:] for time_ms in turn]
        self._clock.seconds += self._left.pop(0) * 1e-3

    def forget_the_rest(self) -> None:
        """Take steps that nobody asked for out of the last turn, so that all figures are alike."""
        if self._left:
            del self._child.turns[-1][-len(self._left) :]
            self._left.clear()
