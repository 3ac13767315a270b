"""``dflash train CONFIG [KEY=VALUE ...]``: train a drafter; called again, go on with it."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dflash.cli.memory import print_forecast, print_rehearsal
from dflash.cli.output import leave_now, print_json, talk
from dflash.errors import STOPPED_EXIT, UsageError

if TYPE_CHECKING:
    from dflash.config import RunConfig
    from dflash.report.progress import AnyRecord, ProgressKind, Sink
    from dflash.train.outcome import Outcome

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="such as optim.lr=3e-4")
]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="folder of the run; default runs/<name of CONFIG>")
]
Resume = Annotated[
    str, typer.Option("--resume", help="auto, never, or a checkpoint or run folder to go on from")
]
MaxSteps = Annotated[
    int | None,
    typer.Option("--max-steps", min=1, help="end after this step; the schedule stays as it is"),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="load all, run one step, print the memory plan, write nothing"),
]
Plan = Annotated[
    bool,
    typer.Option("--plan", help="with --dry-run: memory of every device; needs no GPU, no weights"),
]
DeviceGib = Annotated[
    float | None,
    typer.Option("--device-gib", min=0.1, help="with --plan: memory of every GPU, in GiB"),
]
ProgressOption = Annotated[str, typer.Option("--progress", help="auto, rich, plain or none")]
WatchdogOption = Annotated[
    float,
    typer.Option("--watchdog", min=1.0, help="seconds without progress that count as a hang"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON value on stdout")]


def train(  # noqa: PLR0913 - one option each
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    run_dir: RunDir = None,
    resume: Resume = "auto",
    max_steps: MaxSteps = None,
    dry_run: DryRun = False,
    plan: Plan = False,
    device_gib: DeviceGib = None,
    progress: ProgressOption = "auto",
    watchdog: WatchdogOption = 300.0,
    as_json: AsJson = False,
) -> None:
    """Train a drafter for a frozen target.

    SIGTERM or Ctrl-C checkpoints at the next step, or within an evaluation at its next block, and
    exits with 75; the same command goes on.
    A second signal ends at once, without a checkpoint. SIGUSR2 checkpoints and goes on.
    """
    from dflash.config import load

    if progress not in ("auto", "rich", "plain", "none"):
        raise UsageError(f"--progress {progress}: must be one of auto, rich, plain, none")
    if plan and not dry_run:
        raise UsageError("--plan trains nothing: it belongs to --dry-run")
    if device_gib is not None and not plan:
        raise UsageError("--device-gib belongs to --dry-run --plan")
    settled = load(config, overrides or ()).config
    if plan:
        print_forecast(settled, device_gib=device_gib, as_json=as_json)
        return
    if dry_run:
        print_rehearsal(settled, as_json=as_json)
        return
    folder = run_dir or Path("runs") / config.stem
    outcome = _run(
        settled,
        folder,
        resume=resume,
        max_steps=max_steps,
        progress=cast("ProgressKind", progress),
        watchdog_s=watchdog,
    )
    if as_json:
        print_json(_summary(outcome, folder))
    else:
        print("\n".join(_lines(outcome, folder)))
    if outcome.signal is not None:
        raise typer.Exit(STOPPED_EXIT)


def _run(
    config: "RunConfig",
    folder: Path,
    *,
    resume: str,
    max_steps: int | None,
    progress: "ProgressKind",
    watchdog_s: float,
) -> "Outcome":
    from dflash.pipeline.signals import StoppedNowError
    from dflash.report.progress import make_progress
    from dflash.report.tensorboard import TensorBoardSink, require_tensorboard
    from dflash.train.run import TrainOptions, train
    from dflash.train.stored import complete_checkpoints

    wants_tensorboard = "tensorboard" in config.log.sinks
    if wants_tensorboard:
        require_tensorboard()
    with ExitStack() as stack:
        screen = stack.enter_context(make_progress(progress))
        sinks: list[Sink] = [screen]

        def begin(first_step: int, last_step: int) -> None:
            screen.expect(last_step)
            if wants_tensorboard:
                sinks.append(TensorBoardSink(folder / "tensorboard", resumed_after=first_step))
                stack.callback(sinks[-1].close)

        def show(record: "AnyRecord") -> None:
            for sink in sinks:
                sink.write(record)

        options = TrainOptions(
            run_dir=folder,
            resume=resume,
            max_steps=max_steps,
            watchdog_s=watchdog_s,
            begin=begin,
            show=show,
            say=screen.say,
        )
        try:
            return train(config, options)
        except StoppedNowError as stop:
            screen.close()
            kept = complete_checkpoints(folder)
            left = f"the last checkpoint stands: {kept[-1].name}" if kept else ""
            left = left or "there is no checkpoint yet, so the same command begins again"
            talk(f"stopped at once by a second signal; {left}")
            leave_now(128 + stop.signum)


def _lines(outcome: "Outcome", folder: Path) -> list[str]:
    state = f"step {outcome.step} of {outcome.num_steps}"
    if outcome.step > outcome.num_steps:
        state = f"step {outcome.step}, past the {outcome.num_steps} steps asked for"
    lines = [f"{state}; checkpoint {outcome.checkpoint or 'none new'}"]
    if outcome.tau_before is not None or outcome.last_tau is not None:
        before = f"{outcome.tau_before:.2f} before training, " if outcome.tau_before else ""
        lines.append(f"tau on held-out prompts: {before}{_now(outcome)}")
    lines.append(outcome.suggestion)
    if outcome.signal is not None:
        lines.append("stopped by a signal; run the same command again to go on")
    else:
        lines.append(f"next: dflash eval {folder}, dflash export {folder} OUT")
    return lines


def _summary(outcome: "Outcome", folder: Path) -> dict[str, object]:
    return {
        "run_dir": str(folder),
        "step": outcome.step,
        "num_steps": outcome.num_steps,
        "tau_before": outcome.tau_before,
        "tau": outcome.tau,
        "checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint),
        "signal": outcome.signal,
        "warm_up_s": outcome.warm_up_s,
        "waits": None if outcome.waits is None else asdict(outcome.waits),
        "advice": outcome.suggestion,
    }


def _now(outcome: "Outcome") -> str:
    if outcome.tau is not None:
        return f"{outcome.tau:.2f} now"
    if outcome.last_tau is not None and outcome.last_tau_step:
        return f"{outcome.last_tau:.2f} after step {outcome.last_tau_step}, not measured since"
    return "not measured since"
