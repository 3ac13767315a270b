"""The live screen of a run on a terminal, drawn by rich."""

from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash.records import EvalRecord, EventRecord, StepRecord
from dflash.report.lines import eval_text, record_line, step_figures, time_left
from dflash.report.progress import AnyRecord, Progress, RunClock

REFRESHES_PER_S = 4
BAR_COLUMNS = 40


class ScreenProgress(Progress):
    """The newest figures in place; evaluations and events scroll by above them."""

    def __init__(self, stream: TextIO, *, total_steps: int | None) -> None:
        self._console = Console(file=stream)
        self._clock = RunClock(total_steps)
        self._best: EvalRecord | None = None
        self._live = Live(
            Text("waiting for the first step"),
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
            redirect_stdout=False,
        )
        self._live.start()

    def write(self, record: AnyRecord) -> None:
        if isinstance(record, StepRecord):
            self._live.update(self._picture(record))
            return
        if isinstance(record, EvalRecord) and (self._best is None or record.tau > self._best.tau):
            self._best = record
        style = "dim" if isinstance(record, EventRecord) else "bold"
        self._console.print(Text(record_line(record), style=style))

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def expect(self, total_steps: int) -> None:
        self._clock.total_steps = total_steps

    def close(self) -> None:
        self._live.stop()

    def _picture(self, record: StepRecord) -> Group:
        total = self._clock.total_steps
        head = Table.grid(padding=(0, 1))
        place = f"step {record.step}" + ("" if total is None else f"/{total}")
        bar = ProgressBar(
            total=total, completed=record.step, width=BAR_COLUMNS, pulse=total is None
        )
        left = time_left(self._clock.left_s(record)).removeprefix(" | ")
        head.add_row(Text(place, style="bold"), bar, Text(left))
        figures = Table.grid(padding=(0, 2))
        for name, value in step_figures(record):
            figures.add_row(Text(name, style="dim"), Text(value))
        if self._best is not None:
            figures.add_row(
                Text("best", style="dim"), Text(f"step {self._best.step}: {eval_text(self._best)}")
            )
        return Group(head, figures)
