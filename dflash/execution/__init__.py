"""How a step runs: the execution modes. Knows nothing of DFlash beyond "a step".

A *program* is what one worker repeats on one device: a few named parts that read and write static
buffers. A *runner* is a program made ready in one mode; after ``warm_up`` a worker thread only
feeds and calls it. ``TrainingStep`` is a ready program around a loss and an optimizer.
"""

from dflash.execution.captures import CaptureWatch, capture_watch
from dflash.execution.faults import CaptureError, NumericsError, SealedError
from dflash.execution.graphs import capture
from dflash.execution.modes import CAPTURING, SEALABLE, Mode, ModeChoice, choose_mode
from dflash.execution.peaks import peak_allocated_bytes, peak_reserved_bytes
from dflash.execution.program import Program, Region
from dflash.execution.report import WarmUp
from dflash.execution.runner import Runner
from dflash.execution.seal import Seal, process_seal, sealed, unsealed
from dflash.execution.streams import on_stream, use_device
from dflash.execution.training_step import TrainingStep
from dflash.execution.trial import Ready, make_ready
from dflash.execution.versions import Behaviour, behaviour_of, is_known

__all__ = [
    "CAPTURING",
    "SEALABLE",
    "Behaviour",
    "CaptureError",
    "CaptureWatch",
    "Mode",
    "ModeChoice",
    "NumericsError",
    "Program",
    "Ready",
    "Region",
    "Runner",
    "Seal",
    "SealedError",
    "TrainingStep",
    "WarmUp",
    "behaviour_of",
    "capture",
    "capture_watch",
    "choose_mode",
    "is_known",
    "make_ready",
    "on_stream",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "process_seal",
    "sealed",
    "unsealed",
    "use_device",
]
