"""Every key of a run's configuration, one field each. This file is the reference.

Paths are relative to the directory the command is started in. A key that is absent (``None``
here) has no value in the file; its description says what happens then.
"""

from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from dflash.config.fields import Section, knob, values_of
from dflash.config.rules import broken_rules

PAPER = "arXiv 2602.06036 A.1"
TILE = 128  # edge of a block-mask tile; budgets are whole tiles

Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda:(0|[1-9][0-9]*))$")]
Devices = Annotated[tuple[Device, ...], Strict(strict=False)]
Layers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(strict=False)]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(strict=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Strict(strict=False)]
Sinks = Annotated[tuple[Literal["jsonl", "tensorboard"], ...], Strict(strict=False)]

DEVICES = 'a list of "cpu" and "cuda:N", or ["auto"]'
SOURCES = 'a list of files, folders, "stdlib:train" or "stdlib:heldout"'


class TargetConfig(Section):
    """The frozen model whose features condition the drafter and whose text it must predict."""

    model: str = knob(
        ..., 'folder with safetensors, .gguf file, or "stdlib-lm" (ships with dflash)', min_length=1
    )
    taps: Layers | Literal["auto"] = knob(
        "auto",
        "decoder layers whose outputs are captured; auto spreads num_taps over the depth",
        expects='"auto" or a list of layer numbers, each at least 0',
        min_length=1,
    )
    num_taps: int = knob(
        5, "number of taps that auto chooses", unit="layers", source=PAPER, ge=1, le=64
    )
    devices: Devices = knob(
        ("auto",),
        "where target workers run, one each; auto is cuda:0 if there is one, else cpu",
        expects=DEVICES,
        min_length=1,
    )
    dtype: Literal["auto", "bf16", "fp32"] = knob(
        "auto", "of weights and features; auto is bf16 on cuda and fp32 on cpu"
    )
    trust_remote_code: bool = knob(False, "run Python code that the model folder brings along")


class DrafterConfig(Section):
    """The small model that is trained. Absent shapes are those of the target."""

    num_layers: int = knob(5, "decoder layers", unit="layers", source=PAPER, ge=1)
    block_size: int = knob(
        16, "slots of a block, the anchor included", unit="slots", source=PAPER, ge=2, le=TILE
    )
    mask_token_id: int | None = knob(
        None, "id in the undrafted slots; absent: the target's first unused id", ge=0
    )
    num_heads: int | None = knob(None, "query heads; absent: like the target", ge=1)
    num_kv_heads: int | None = knob(None, "key and value heads; absent: like the target", ge=1)
    head_dim: int | None = knob(None, "width of a head, even; absent: like the target", ge=2)
    intermediate_size: int | None = knob(None, "width of the MLP; absent: like the target", ge=1)
    devices: Devices = knob(
        ("auto",),
        "where drafter workers run, one replica each; auto is cuda:0 if there is one, else cpu",
        expects=DEVICES,
        min_length=1,
    )
    init_from: str | None = knob(
        None, "z-lab drafter folder to start from; absent: random weights", min_length=1
    )


class DataConfig(Section):
    """What is read, and how it is packed."""

    train: Texts = knob(..., "what to train on", expects=SOURCES, min_length=1)
    heldout: Texts = knob(
        (), "what evaluation prompts come from, never trained on", expects=SOURCES
    )
    token_budget: int = knob(
        8192, "positions of a packed batch, T", unit="tokens", ge=TILE, multiple_of=TILE
    )
    anchor_density: float = knob(
        1 / 6, "anchors per token of the budget", source=f"{PAPER}: 512 of 3072", gt=0, le=1
    )
    max_document_tokens: int = knob(
        4096, "longer documents are split", unit="tokens", source=f"{PAPER}: Coder", ge=3
    )
    max_bad_share: float = knob(
        0.01, "share of bad rows above which the run stops", unit="of rows", ge=0, le=1
    )


class ObjectiveConfig(Section):
    """How the slots of a block are weighted in the loss."""

    kind: Literal["decay", "dpace"] = knob(
        "decay", "weights that fall with the slot, or follow measured acceptance", source=PAPER
    )
    gamma: float | None = knob(
        None,
        "decay length; absent: 7, 5, 4 for blocks of 16, 10, 8, otherwise (block_size - 1) / 2",
        unit="slots",
        source=PAPER,
        gt=0,
    )
    dpace_alpha: float = knob(
        0.5, "smoothing of D-PACE weights (kind = dpace)", source="speculators", ge=0, le=1
    )


class OptimConfig(Section):
    """AdamW with a linear warm-up and a cosine; exactly one of max_steps and epochs is set."""

    lr: float = knob(6e-4, "peak learning rate", source=PAPER, gt=0)
    warmup_ratio: float = knob(
        0.04, "share of the steps that warm up", unit="of steps", source=PAPER, ge=0, lt=1
    )
    min_lr_ratio: float = knob(
        0.0, "where the cosine ends", unit="of lr", source=f"{PAPER}: to 0", ge=0, le=1
    )
    weight_decay: float = knob(0.0, "decoupled weight decay", source="SpecForge", ge=0)
    betas: Betas = knob(
        (0.9, 0.95),
        "decay of the two moments",
        source="NeMo AutoModel",
        expects="a list of 2 numbers, each at least 0 and below 1",
    )
    eps: float = knob(1e-8, "keeps AdamW from dividing by zero", source="AdamW", gt=0)
    clip_norm: float = knob(1.0, "largest global gradient norm", source=PAPER, gt=0)
    max_steps: int | None = knob(None, "optimizer steps of the run", unit="steps", ge=1)
    epochs: int | None = knob(
        None, "passes over the data", unit="epochs", source=f"{PAPER}: 6", ge=1
    )
    accumulate_steps: int = knob(
        1, "packed batches whose gradients make one step", unit="batches", ge=1
    )


class ExecutionConfig(Section):
    """How a step runs."""

    mode: Literal["auto", "eager", "compiled", "reduce-overhead", "warmed", "graphed"] = knob(
        "auto",
        "graphed replays a step from CUDA graphs, warmed lets torch capture it before a worker"
        " starts, reduce-overhead whenever it meets something new, compiled and eager launch it;"
        " auto is eager where a drafter is on the CPU, else the first of graphed, compiled and"
        " eager that a trial finds to work",
    )
    allow_unsafe: bool = knob(
        False, "let reduce-overhead run on a torch on which several drafters die of it"
    )
    activation_checkpointing: bool = knob(
        False, "recompute layers in the backward pass: less memory, more time"
    )
    gradient_sum: Literal["auto", "nccl", "fixed_order"] = knob(
        "auto",
        "how several drafters add up; auto is nccl where each has a GPU and all are peers, else"
        " fixed_order",
    )
    check_replicas_every: int = knob(
        100,
        "steps between comparisons of several drafters' bits; 0 compares never",
        unit="steps",
        ge=0,
    )


Matmul = Literal["bf16", "fp8", "fp8-head"]


class PrecisionConfig(Section):
    """Weights, gradients' sums and optimizer state are fp32 in any case."""

    compute: Literal["auto", "bf16", "fp32"] = knob(
        "auto", "dtype of the drafter's activations; auto is bf16 on cuda and fp32 on cpu"
    )
    matmul: Matmul = knob(
        "bf16",
        "of matrix products: bf16 is the activations' own dtype, fp8 8-bit floats for the drafter"
        " and the frozen LM head, fp8-head for the head alone; 8 bits need a GPU of compute"
        " capability 8.9 or more; gradients of weights stay bf16",
    )


class EvalConfig(Section):
    """Accepted length by real decoding on prompts from data.heldout."""

    every_steps: int = knob(
        0, "steps between evaluations; 0 evaluates only at the end", unit="steps", ge=0
    )
    num_prompts: int = knob(16, "held-out prompts that are decoded", unit="prompts", ge=1)
    max_new_tokens: int = knob(128, "length of an answer", unit="tokens", ge=1)


class CheckpointConfig(Section):
    """When the run is saved and what is kept."""

    every_steps: int = knob(
        500, "steps between checkpoints; the last is saved too", unit="steps", ge=1
    )
    keep_last: int = knob(3, "newest checkpoints to keep", unit="checkpoints", ge=1)
    keep_best: bool = knob(True, "also keep the one with the longest measured accepted length")


class LogConfig(Section):
    """What is written while the run goes on."""

    every_steps: int = knob(10, "steps between records", unit="steps", ge=1)
    sinks: Sinks = knob(
        ("jsonl",),
        'where records go; "jsonl" is required, since resuming and diagnosing read it',
        min_length=1,
    )


class RunConfig(Section):
    """A whole run. ``dflash.config.load`` makes one from a file."""

    seed: int = knob(
        0,
        "of weights, data order and anchors",
        expects="a whole number from 0 to 2**63 - 1",
        ge=0,
        lt=2**63,
    )
    target: TargetConfig
    drafter: DrafterConfig = Field(default_factory=DrafterConfig)
    data: DataConfig
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    execution: ExecutionConfig = Field(default_factory=ExecutionConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @model_validator(mode="after")
    def _hold_the_rules(self) -> "RunConfig":
        broken = broken_rules(values_of(self))
        if broken:
            raise ValueError("; ".join(f"{rule.key}: {rule.text}" for rule in broken))
        return self
