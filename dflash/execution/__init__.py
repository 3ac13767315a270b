"""How a step runs: the execution modes. Knows nothing of DFlash beyond "a step".

A *program* is what one worker repeats on one device: a few named parts that read and write static
buffers. A *runner* is a program made ready in one mode; after ``warm_up`` a worker thread only
feeds and calls it.
"""

from dflash.execution.graphs import capture
from dflash.execution.modes import Mode, ModeChoice, choose_mode
from dflash.execution.program import Program, Region
from dflash.execution.runner import Runner

__all__ = ["Mode", "ModeChoice", "Program", "Region", "Runner", "capture", "choose_mode"]
