"""``eager`` and ``compiled``: every part is Python that launches kernels."""

from dflash.execution.compiling import compile_regions
from dflash.execution.program import Program
from dflash.execution.report import WarmUp
from dflash.execution.rounds import rehearse


class Launched:
    """Parts as they are, with their regions compiled or not."""

    def __init__(self, program: Program, *, compiled: bool) -> None:
        self._program = program
        self._parts = dict(program.parts)
        self._undo = compile_regions(program, all_of_them=compiled)

    def warm_up(self) -> WarmUp:
        """Run every round twice: the second time nothing compiles and no allocation is new."""
        rehearse(self._program, self.run)
        second = rehearse(self._program, self.run)
        return WarmUp(launched_s=second.seconds)

    def enter_worker(self) -> WarmUp:
        """Run every round once here: a thread has a cuBLAS handle and workspace of its own."""
        if self._program.device.type == "cuda":
            rehearse(self._program, self.run)
        return WarmUp()

    def run(self, part: str) -> None:
        """Launch one part."""
        self._parts[part]()

    def close(self) -> None:
        """Put the functions back."""
        self._undo()
