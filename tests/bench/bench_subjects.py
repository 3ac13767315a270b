"""Subjects for processes that take turns; imports no torch, so that a process starts quickly."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any, ClassVar


class Sound:
    """Writes down when it is its turn."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log

    def build(self) -> dict[str, Any]:
        return {"process": os.getpid()}

    def prepare(self) -> dict[str, Any]:
        return {}

    def turn(self) -> list[float]:
        with self.log.open("a") as file:
            file.write(self.name)
        return [1.0, 2.0]

    def finish(self) -> dict[str, Any]:
        return {"finished": True}


class Answering(Sound):
    def build(self) -> dict[str, Any]:
        self.log.write_text("built")
        return {}


class Raising(Sound):
    def turn(self) -> list[float]:
        raise ValueError("a tensor of the wrong shape\nand a second line")


class Empty(Sound):
    def turn(self) -> list[float]:
        return []


class Made(Sound):
    SECONDS = 0.5

    def __init__(self, name: str, log: Path) -> None:
        super().__init__(name, log)
        log.write_text("made")

    def build(self) -> dict[str, Any]:
        time.sleep(self.SECONDS)
        self.log.write_text("built")
        return {}


class Crashing(Sound):
    def prepare(self) -> dict[str, Any]:
        os.abort()


class Unbuilt(Sound):
    def build(self) -> dict[str, Any]:
        os._exit(3)


class Leaving(Sound):
    def finish(self) -> dict[str, Any]:
        os._exit(7)


class Hanging(Sound):
    def turn(self) -> list[float]:
        time.sleep(600)
        return []


class Printing(Sound):
    def turn(self) -> list[float]:
        print("this is not a result")  # noqa: T201 - what the test is about
        return [1.0, 2.0]


class Slow(Sound):
    SECONDS = 4.0

    def prepare(self) -> dict[str, Any]:
        time.sleep(self.SECONDS)
        return {}


class Long(Sound):
    """Its turns take longer than whoever asks for them has patience."""

    def turn(self) -> list[float]:
        time.sleep(1.0)
        return [3.0]

    def so_far(self) -> dict[str, Any]:
        return {"told": "so far"}


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class AcceleratorError(RuntimeError):
    """Named as torch's."""


class Timed:
    """Says of its steps what its setting's mode tells it to; knows no clock."""

    STEP_MS: ClassVar = {"base": 10.0, "same": 10.0, "quick": 5.0, "halting": 10.0}
    UNITS = 100.0

    def __init__(self, setting: Any, log: Path | None = None) -> None:  # noqa: ANN401 - no import
        self.mode = setting.mode
        self.num_steps = setting.turn_steps
        self.log = log
        self.random = random.Random(setting.mode)
        self._note("*")

    def build(self) -> dict[str, Any]:
        self._note("+")
        return {"build_s": 0.5, "units": self.UNITS}

    def prepare(self) -> dict[str, Any]:
        if self.mode == "early":
            raise MemoryError
        if self.mode == "crowded-early" and self._others_are_there():
            raise AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemory...")
        return {"warm_up_s": 0.25, "first_steps_ms": [1000.0]}

    def settle(self) -> list[float]:
        return [500.0]

    def restart(self) -> None:
        self._note("<")

    def turn(self) -> list[float]:
        self._note("")
        if self.mode == "trees":
            get_obj()
        if self.mode == "crash":
            os.abort()
        if self.mode == "interrupt":
            self._interrupt()
        if self.mode == "interrupt twice":
            os.kill(os.getppid(), signal.SIGINT)
        if self.mode == "crowded" and self._others_are_there():
            raise OutOfMemoryError("CUDA out of memory")
        step_ms = self.STEP_MS.get(self.mode, 10.0)
        times_ms = [step_ms * self.random.uniform(0.999, 1.001) for _ in range(self.num_steps)]
        if self.mode == "halting":
            times_ms[0] *= 2 * self.num_steps
        return times_ms

    def bare(self) -> float:
        return self.STEP_MS.get(self.mode, 10.0) / 1.25

    def so_far(self) -> dict[str, Any]:
        if self.mode == "interrupt twice":
            self._interrupt()
        return {"loss": {"base": 2.0}.get(self.mode, 2.1), "gpu_process": os.getpid()}

    def finish(self) -> dict[str, Any]:
        if self.mode == "crowded-late" and self._others_are_there():
            raise OutOfMemoryError("CUDA out of memory")
        self._note("-")
        return {**self.so_far(), "more": {"pid": os.getpid()}}

    def _interrupt(self) -> None:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)

    def _others_are_there(self) -> bool:
        assert self.log is not None
        told = self.log.read_text().split()
        others = {word[1:] for word in told if word[0] == "+"} - {self.mode}
        return any(told.count(f"+{each}") > told.count(f"-{each}") for each in others)

    def _note(self, what: str) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{what}{self.mode} ")


def get_obj() -> None:
    """Ends as torch's own function of this name does where a thread has no cudagraph trees."""
    program = "def get_obj():\n    raise AssertionError\nget_obj()"
    exec(compile(program, "torch/_inductor/cudagraph_trees.py", "exec"), {})  # noqa: S102 - its place
