"""Records as TensorBoard scalars; behind the extra ``tensorboard``."""

from importlib import util
from pathlib import Path

from dflash.errors import MissingError
from dflash.records import EvalRecord, EventRecord, StepRecord

SKIPPED = {
    "step",
    "kind",
    "tau_per_prompt",
    "accepted_per_position",  # written point by point
    "steps_by_accepted_tokens",
}


def require_tensorboard() -> None:
    """Say early that the package is missing, before a model is loaded.

    Raises:
        MissingError: the package tensorboard is not installed.
    """
    if util.find_spec("tensorboard") is None:
        raise MissingError(
            'log.sinks has "tensorboard", but the package tensorboard is not installed',
            hint="pip install 'dflash-trainer[tensorboard]', or take it out of log.sinks",
        )


class TensorBoardSink:
    """Writes every figure of step and eval records under ``step/`` and ``eval/``.

    Args:
        folder: where event files go.
        resumed_after: step of the checkpoint a run goes on from; later points are hidden.

    Raises:
        MissingError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, resumed_after: int | None = None) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_after is None else resumed_after + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, record: StepRecord | EvalRecord | EventRecord) -> None:
        if isinstance(record, EventRecord):
            text = ", ".join(f"{name}={value}" for name, value in record.detail.items())
            self._writer.add_text(f"event/{record.name}", text, record.step)
            return
        for name, value in _scalars(record):
            self._writer.add_scalar(f"{record.kind}/{name}", value, record.step)
        if isinstance(record, EvalRecord):
            for position, share in enumerate(record.accepted_per_position, start=1):
                self._writer.add_scalar(f"eval/accepted_at/{position}", share, record.step)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _scalars(record: StepRecord | EvalRecord) -> list[tuple[str, float]]:
    found = []
    for name, value in record.model_dump(exclude=SKIPPED, exclude_none=True).items():
        by_device = value if isinstance(value, dict) else {"": value}
        found += [
            (f"{name}/{device}" if device else name, float(number))
            for device, number in by_device.items()
            if isinstance(number, int | float)  # a curve of words there is not
        ]
    return found
