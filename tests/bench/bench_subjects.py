"""Subjects for processes that take turns; imports no torch, so that a process starts quickly."""

import os
import time
from pathlib import Path
from typing import Any


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


class Raising(Sound):
    def turn(self) -> list[float]:
        raise ValueError("a tensor of the wrong shape\nand a second line")


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
