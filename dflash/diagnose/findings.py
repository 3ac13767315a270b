"""What a diagnosis holds: the published JSON. ``dflash diagnose --schema`` prints its schema."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash.environment import Environment
from dflash.readable import readable_facts

Variant = Literal["own", "faulty", "sound", "control"]
Part = Literal["whole", "cpu"]
End = Literal[
    "number", "signal", "hang", "cuda error", "out of memory", "exception", "killed", "not started"
]
Verdict = Literal["reproduced", "not reproduced", "not applicable", "inconclusive"]
Expected = Literal["reproduced", "not reproduced", "not known"]
Verified = Literal["yes", "no", "unclear", "not run"]
Severity = Literal["error", "warning", "none"]


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    _readable = model_validator(mode="before")(readable_facts)


class Mark(_Facts):
    """Something that a thread of a child did."""

    kind: str
    thread: str
    at_s: float = Field(description="seconds since the child was started")
    detail: dict[str, Any] = {}


class Launch(_Facts):
    """One child process and how it ended."""

    variant: Variant
    seed: int
    end: End = Field(
        description="'number', or how it ended without one; 'killed' says nothing: by a signal from"
        " outside, or by a --timeout that is shorter than the mode's own"
    )
    value: float | None = Field(default=None, description="the number that decides")
    message: str = Field(default="", description="exception, signal or limit, as the user sees it")
    thread: str = Field(default="", description="the thread of the exception")
    wall_s: float = Field(default=0.0, description="seconds from its start to its end")
    traceback: str = ""
    stacks: str = Field(default="", description="all threads, as faulthandler wrote them")
    stderr_tail: str = ""
    marks: list[Mark] = []

    def brief(self) -> "Launch":
        """The same without traceback, stacks, output and marks."""
        bulk: dict[str, Any] = {"traceback": "", "stacks": "", "stderr_tail": "", "marks": []}
        return self.model_copy(update=bulk)


class Rate(_Facts):
    """How many launches showed the failure, and between which bounds the true rate lies."""

    shown: int
    launches: int
    at_least: float = Field(description="exact one-sided 95 % bound")
    at_most: float = Field(description="exact one-sided 95 % bound")


class Finding(_Facts):
    """The verdict on one failure mode on this machine."""

    slug: str
    title: str = Field(description="the failure as a sentence")
    device: str = Field(description="what it takes to show all of it")
    verdict: Verdict
    why: str = Field(description="the verdict in a few words")
    expected: Expected
    expected_why: str
    part: Part | None = Field(default=None, description="what was run; null: nothing")
    not_run: str = Field(default="", description="what this machine could not run")
    deterministic: bool = Field(default=False, description="one launch decides")
    measures: str = ""
    unit: str = ""
    limit: float = 0.0
    faulty: Rate | None = None
    sound: Rate | None = None
    control: Rate | None = None
    worst: float | None = Field(default=None, description="largest number of the faulty variant")
    best: float | None = Field(default=None, description="largest number of the sound variant")
    remedy: str = Field(default="", description="production code that prevents it")
    remedy_verified: Verified = "not run"
    remedy_why: str = ""
    severity: Severity = "none"
    wall_s: float = 0.0
    launches: list[Launch] = []


class ModeAdvice(_Facts):
    """Whether an execution mode is safe here."""

    mode: str
    safe: Literal["yes", "no", "not known", "cannot run"]
    why: str


class Advice(_Facts):
    """What a trainer's user should do on this machine."""

    num_targets: int
    num_drafters: int
    modes: list[ModeAdvice]
    choose: str
    why: str
    config: str = Field(description="keys to set, by section of a configuration")

    @property
    def sentence(self) -> str:
        """The last line of ``dflash diagnose all``."""
        safe = ", ".join(each.mode for each in self.modes if each.safe == "yes") or "none"
        return (
            f"with {self.num_targets} target(s) and {self.num_drafters} drafter(s): safe here:"
            f" {safe}; choose {self.choose}"
        )


class Diagnosis(_Facts):
    """Everything that one call of ``dflash diagnose`` found out."""

    kind: Literal["diagnosis"] = "diagnosis"
    format: Literal[1] = 1
    torch: str
    level: str
    environment: Environment
    findings: list[Finding]
    advice: Advice | None = None
    complete: bool = Field(default=True, description="false: interrupted, later modes are missing")
    missing: list[str] = Field(default=[], description="slugs that an interrupt left out")
    wall_s: float = 0.0


class Suffered(_Facts):
    """One thing that a finished run suffered from."""

    slug: str
    title: str
    evidence: list[str]
    remedy: str = ""


class RunDiagnosis(_Facts):
    """What ``dflash diagnose run`` read out of a run folder."""

    kind: Literal["run diagnosis"] = "run diagnosis"
    format: Literal[1] = 1
    run_dir: str
    suffered: list[Suffered]
    notes: list[str] = []


class Stall(_Facts):
    """A time in which a watched program did nothing."""

    at_s: float = Field(description="seconds since its start when that was said")
    still_s: float = Field(description="seconds without output and processor time")
    stacks: str = Field(description="all threads, as faulthandler wrote them; may be empty")


class WatchedProcess(_Facts):
    """One Python process of a watched program, and what it had counted at its end."""

    pid: int
    argv: list[str]
    python: str
    torch: str = Field(description="the version it imported; empty: none")
    compiled_graphs: int = Field(description="by torch.compile")
    recompiled_frames: int = Field(description="versions of a frame after its first")
    skipped_graphs: int = Field(description="that torch was asked to capture and did not")
    captures: dict[str, int] = Field(description="CUDA graphs by thread")
    memory: dict[str, dict[str, int]] = Field(
        description="bytes reserved at its end, peak bytes allocated, device allocations; by device"
    )


class WatchDiagnosis(_Facts):
    """What ``dflash diagnose watch`` saw of a user's own program."""

    kind: Literal["watch diagnosis"] = "watch diagnosis"
    format: Literal[1] = 1
    command: list[str]
    exit_code: int | None = Field(description="the program's own; null: a signal ended it")
    signal: str = Field(default="", description="the signal that ended it")
    ended_for_stall: bool = Field(default=False, description="--kill-on-stall ended it")
    wall_s: float
    suffered: list[Suffered]
    stalls: list[Stall] = []
    died: list[str] = Field(default=[], description="threads that an exception ended, with it")
    processes: list[WatchedProcess] = []
    undiagnosed: str = Field(default="", description="why nothing could be looked for, if so")
    notes: list[str] = []
