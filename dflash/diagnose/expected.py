"""What was expected of the installed torch, before anything is launched."""

import re
from typing import NamedTuple

from dflash.diagnose.findings import Expected
from dflash.failures import WITH_GPU, FailureMode


class Expectation(NamedTuple):
    """What should happen, and how that is known."""

    expected: Expected
    why: str


def expectation(mode: FailureMode, torch_version: str, *, num_gpus: int = 0) -> Expectation:
    """Look *torch_version* ("2.11.0+cu130") up in what the page says about versions.

    Where torch sees a GPU, what the page says about that goes before what it says of the version.

    A version that the page does not list is not known, whatever its neighbours do: a failure that
    was mended may come back, and one that was not may be mended.
    """
    if not mode.affected:
        return Expectation("reproduced", "the failure is in the program, whatever the torch")
    minor = minor_version(torch_version)
    if minor is None:
        return Expectation("not known", f"torch {torch_version} is no released version")
    if minor not in mode.affected:
        minors = [key for key in mode.affected if not key.endswith(WITH_GPU)]
        known = ", ".join(sorted(minors, key=_numbers))
        return Expectation("not known", f"nobody tried torch {minor}; the page knows of {known}")
    with_gpu = f"{minor}{WITH_GPU}"
    key = with_gpu if num_gpus and with_gpu in mode.affected else minor
    has = "has" if mode.affected[key] else "does not have"
    return Expectation(
        "reproduced" if mode.affected[key] else "not reproduced",
        f"torch {key} {has} this failure",
    )


def minor_version(torch_version: str) -> str | None:
    """``"2.11"`` of ``"2.11.0+cu130"``; nothing of an alpha, a candidate or a nightly."""
    found = re.fullmatch(r"(\d+\.\d+)(\.\d+)*(\+.*)?", torch_version)
    return found[1] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))
