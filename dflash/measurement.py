"""What a bench holds: the published JSON. ``dflash bench --schema`` prints its schema.

Names carry their units; a figure that a machine or a mode does not have is null, never zero.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash.environment import Environment
from dflash.readable import readable_facts

FORMAT = 1
"""Of the JSON; another number means other names or other meanings."""

State = Literal["measured", "failed", "skipped"]
Verdict = Literal["same", "faster", "slower", "unclear"]


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    _readable = model_validator(mode="before")(readable_facts)


class Estimate(_Facts):
    """A figure and its bootstrap interval, of 95 % unless its field says otherwise."""

    value: float
    low: float
    high: float


class Spread(_Facts):
    """Milliseconds of all timed steps."""

    median: float
    p10: float
    p90: float
    max: float
    count: int


class Failed(_Facts):
    """How a process ended before its time."""

    type: str = Field(description="of the exception, or Hang or ProcessDied")
    message: str = Field(description="first line, as the user sees it")
    during: str = Field(description="load, build, prepare, settle, turn, bare or finish")
    slug: str = Field(default="", description="the failure mode, as dflash explain knows it")
    traceback: str = ""


class StartUp(_Facts):
    """What came before the first timed step; never mixed into the step times."""

    first_step_s: float | None = Field(
        default=None,
        description="process start to end of first step, waiting left out; null: it made none",
    )
    build_s: float | None = Field(default=None, description="weights and inputs")
    warm_up_s: float | None = Field(
        default=None, description="compiling, capturing, rehearsing before the first step"
    )
    compile_s: float | None = Field(
        default=None, description="in torch.compile, during later steps too"
    )
    capture_s: float | None = Field(
        default=None, description="in captures of CUDA graphs, during later steps too"
    )
    first_steps_ms: list[float] = Field(default=[], description="untimed steps, in their order")
    pays_back_after_steps: float | None = Field(
        default=None,
        description="steps after which start-up is won back against the baseline; null: its step"
        " was not found to be faster",
    )


class Memory(_Facts):
    """Peaks of one process, in GiB; of the allocator unless said otherwise."""

    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    graph_pools_gib: float | None = Field(default=None, description="held by pools of CUDA graphs")
    process_gib: float | None = Field(default=None, description="of the process on GPUs, by NVML")
    rss_gib: float | None = Field(default=None, description="resident host memory")
    device_allocs: int | None = Field(default=None, description="after the first step")
    alloc_retries: int | None = Field(default=None, description="after the first step")
    planned_gib: float | None = Field(default=None, description="what the memory plan predicts")
    steps: list[int] = Field(default=[], description="at which the two series were read")
    allocated_gib: list[float] = Field(default=[], description="current peak at those steps")
    reserved_gib: list[float] = []


class Graphs(_Facts):
    """What was compiled and captured."""

    compiled: int | None = Field(default=None, description="graphs, over the whole process")
    cached: int | None = Field(default=None, description="of them held by torch's compile cache")
    recompiles: int | None = Field(default=None, description="after the first step")
    captured: int | None = Field(default=None, description="CUDA graphs, over the whole process")
    captured_late: int | None = Field(default=None, description="of them after the first step")
    skipped: int | None = Field(default=None, description="compiled graphs not captured")


class Row(_Facts):
    """One mode of one case at one shape."""

    case: str
    shape: str
    mode: str = Field(description="execution mode, or the variant of a case that has no modes")
    lengths: Literal["fixed", "variable"] = "fixed"
    padded: bool = Field(default=False, description="variable lengths padded to one shape")
    state: State
    why: str = Field(default="", description="why it was skipped, or what spoilt it")
    failed: Failed | None = None
    unit: str = Field(default="token", description="what per_s counts: real, not padding")
    per_s: Estimate | None = Field(default=None, description="units per second")
    step_ms: Spread | None = None
    turns_ms: list[list[float]] = Field(default=[], description="timed steps of every turn")
    start_up: StartUp | None = None
    memory: Memory | None = None
    graphs: Graphs | None = None
    model_tflops: float | None = Field(default=None, description="model FLOP/s over 1e12")
    matrix_share: float | None = Field(
        default=None, description="of a matrix product's rate measured in the same run"
    )
    loss: float | None = Field(default=None, description="mean over the same steps in every mode")
    loss_against_eager: float | None = Field(default=None, description="relative difference")
    more: dict[str, Any] = Field(default={}, description="what only this case reports")

    @property
    def name(self) -> str:
        """What tells it from the other rows of a bench."""
        return f"{self.case} {self.shape} {self.lengths} {self.mode}"


class Comparison(_Facts):
    """How the step time of one row compares with another's, over interleaved turns."""

    row: str = Field(description="name of the row")
    baseline: str = Field(description="name of the row it is compared with")
    ratio: Estimate = Field(
        description="step time of the row over the baseline's, below 1: faster; 99 % interval"
    )
    pairs: int
    precision: float = Field(description="smallest relative difference that counts")
    verdict: Verdict
    slow_steps_count: bool = Field(
        default=False,
        description="slow steps come in most turns of one, so the ratio is of mean steps, else of"
        " typical ones",
    )


class Spoiled(_Facts):
    """Something that made a part of the run less believable."""

    what: Literal["throttled", "clocks", "other processes", "temperature"]
    text: str = Field(description="one sentence with the figures")
    share: float = Field(
        description="share of the samples in which it was seen; of a device in use beforehand"
    )


class Weather(_Facts):
    """What NVML saw of the GPUs while steps were timed."""

    samples: int = 0
    sm_mhz_median: float | None = None
    sm_mhz_low: float | None = None
    sm_mhz_high: float | None = None
    power_w_median: float | None = None
    power_limited_share: float | None = Field(
        default=None,
        description="share of the samples at the power limit, where a GPU at full work belongs",
    )
    temperature_c_max: float | None = None
    spoiled: list[Spoiled] = []
    unknown_because: str = ""


class Scaling(_Facts):
    """A cost curve: one quantity swept, the rest of the shape kept."""

    over: str = Field(description="token_budget, num_anchors, num_documents or drafters")
    values: list[float]
    rows: list[str] = Field(description="name of the row at each value")
    step_ms: list[float | None]
    exponent: Estimate | None = Field(default=None, description="step_ms ~ value ** exponent")
    peak_gib: list[float | None]
    planned_gib: list[float | None]
    wall: float | None = Field(default=None, description="first value too big by the plan")


class Bench(_Facts):
    """Everything that one call of ``dflash bench`` measured."""

    kind: Literal["bench"] = "bench"
    format: Literal[1] = 1
    command: str
    date: str
    commit: str | None = None
    complete: bool = Field(default=True, description="false: interrupted")
    wall_s: float = 0.0
    environment: Environment
    device: str = Field(description="name of the GPU or CPU that was measured")
    shapes: dict[str, dict[str, Any]] = Field(default={}, description="every shape by its name")
    options: dict[str, Any] = {}
    matrix_tflops: float | None = Field(
        default=None,
        description="bf16 product of two 8192 x 8192 matrices on the GPU, in the same run; null on"
        " a CPU",
    )
    overhead_share: Estimate | None = Field(
        default=None, description="of a step's time, what measuring it costs; 99 % interval"
    )
    rows: list[Row] = []
    comparisons: list[Comparison] = []
    scaling: list[Scaling] = []
    weather: Weather | None = None


class Change(_Facts):
    """How one figure of one row differs between two benches."""

    row: str = Field(description="name of the row")
    figure: str = Field(description="step_ms, per_s, peak_reserved_gib ...; carries its unit")
    before: float | None = None
    after: float | None = None
    ratio: Estimate | None = Field(
        default=None,
        description="after over before, 99 % interval; low = high where a figure is read only once",
    )
    verdict: Literal["same", "better", "worse", "unclear"]
    regression: bool | None = Field(
        default=False, description="it breaks the rule; null: too noisy to tell, or not measured"
    )
    rule: str = Field(default="", description="the rule that was asked about it, as given")


class Changes(_Facts):
    """Two benches beside each other: what ``dflash bench compare`` reports."""

    kind: Literal["bench changes"] = "bench changes"
    format: Literal[1] = 1
    before: str = Field(description="file, commit and date of the earlier one")
    after: str
    differences: list[str] = Field(
        default=[], description="what else differs: machine, versions; a sentence each"
    )
    changes: list[Change] = []
    notes: list[str] = Field(
        default=[], description="rows that only one has, or that failed; a sentence each"
    )
