"""What goes wrong while a program is made ready or runs sealed, in sentences."""

import threading
import traceback
from pathlib import Path

import torch

from dflash.errors import DflashError

TORCH = str(Path(torch.__file__).parent)
ANOTHER_MODE = (
    'set execution.mode = "compiled", which captures nothing, or "auto", which tries the fastest'
    " mode first and says what it took"
)


class CaptureError(DflashError):
    """Something could not be captured into a CUDA graph. Exit code 2: the mode asked for it."""


class NumericsError(DflashError):
    """Two ways of running the same rounds gave different numbers."""

    exit_code = 1


class SealedError(DflashError):
    """A sealed program met what it was not made ready for: a shape, a recompile, a capture."""

    exit_code = 14


def capture_error(what: str, device: torch.device, error: Exception) -> CaptureError:
    """Say which operation broke the capture of *what*, and in which thread."""
    return CaptureError(
        f"{what} could not be captured as a CUDA graph on {device} in thread"
        f" {threading.current_thread().name}: {_operation(error)}:"
        f" {type(error).__name__}: {_headline(error)}",
        hint=ANOTHER_MODE,
    )


def _operation(error: BaseException) -> str:
    """The deepest line outside of torch that *error* passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not frame.filename.startswith(TORCH)]
    if not ours:
        return "outside of Python"
    last = ours[-1]
    return f"`{last.line or last.name}` ({Path(last.filename).name}:{last.lineno})"


def _headline(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def recompile_error(part: str, error: RuntimeError) -> SealedError:
    """Say what a sealed program would have compiled, where, and why."""
    reasons = [line.strip(" -") for line in str(error).splitlines()[1:] if line.strip(" -")]
    because = reasons[-1] if reasons else _headline(error)
    return SealedError(
        f'part "{part}" would compile again in thread {threading.current_thread().name} after the'
        f" program was sealed: {because}",
        hint="every shape, dtype, device and flag that a part sees must have been there at"
        ' warm-up; execution.mode = "eager" compiles nothing but kernels',
    )


def sealed_capture_error() -> SealedError:
    """Say that something began to capture in this thread while captures are refused."""
    return SealedError(
        f"a CUDA graph capture began in thread {threading.current_thread().name} after the program"
        " was sealed",
        hint="capture before sealing, or inside `dflash.execution.unsealed()` in a thread whose"
        ' captures nobody minds; execution.mode = "compiled" captures nothing',
    )
