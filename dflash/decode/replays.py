"""Captured steps, kept from prompt to prompt and from evaluation to evaluation.

Rows come in sizes of powers of two, so that few sets of buffers and graphs serve all prompts. Where
a target cannot be captured, or where a captured step does not give the eager logits, decoding goes
on eagerly and says why: ``eager_because``.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash.decode.answer import DecodeLoop
from dflash.decode.eager import Session
from dflash.decode.rows import NotStaticError, StaticRows, StaticTarget, rows_bytes
from dflash.decode.static import Kind, Launch, StaticBuffers, StaticSteps
from dflash.drafter.model import Drafter
from dflash.drafter.shape import DrafterShape

if TYPE_CHECKING:
    from dflash.target.model import Target

MIN_ROWS = 128
WARM_UP_RUNS = 2
"""Runs before a capture; they go on from each other, so rows must have room for their blocks."""

KEPT_BYTES = 2 * 1024**3
"""Sets of buffers that were not used last are dropped beyond this; one set is always kept."""

TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3}
"""Of the logits' deviation from their mean, in the middle row: two routed experts that swap in one
row of bf16 are no fault, while a wrong mask or position moves every row by its own size. Rounding
alone: 0.108 was seen in bf16 (SmolLM2-135M on a HumanEval prompt, one H200); fp32 is what tells
small faults."""


class Replays:
    """The captured steps of one target; used by one thread at a time, as its lock is.

    Args:
        target: whose steps they are.
        eager_because: do not capture, for this reason; None captures on a CUDA device.
        launch: makes a body ready to be launched; for tests, ``lambda body: body`` runs the very
            steps that would be captured, on any device.
        kept_bytes: see ``KEPT_BYTES``.
    """

    def __init__(
        self,
        target: "Target",
        *,
        eager_because: str | None = None,
        launch: Callable[[Launch], Launch] | None = None,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._target = target
        self._device = torch.device(target.device)
        self._launch = launch
        self._kept_bytes = kept_bytes
        self._capturer: Any = None
        self._twin: StaticTarget | None = None
        self._buffers: dict[int, StaticBuffers] = {}  # by rows; the one used last is the last
        self._drafter: Drafter | None = None
        self._weights: tuple[int, ...] = ()
        self.eager_because = eager_because
        if launch is None and self._device.type != "cuda" and eager_because is None:
            self.eager_because = f"graphs are captured on CUDA devices only, not on {self._device}"

    @property
    def decode_loop(self) -> DecodeLoop:
        return "captured" if self.eager_because is None else "eager"

    @property
    def num_bytes(self) -> int:
        """What is held between prompts: rows, contexts, races, and the graphs' own pool."""
        pool = 0 if self._capturer is None else int(self._capturer.pool_bytes)
        return pool + sum(buffers.num_bytes for buffers in self._buffers.values())

    def ready(
        self, session: Session, drafter: Drafter | None, choice_1: Tensor
    ) -> StaticSteps | None:
        """Return the steps of a prefilled prompt, not loaded yet; None where they must be eager.

        Captures where there is nothing yet. The session is as before in any case.
        """
        if self.eager_because is not None:
            return None
        try:
            return self._ready(session, drafter, choice_1)
        except Exception as error:  # noqa: BLE001 (whatever it is: recorded, and eager goes on)
            self._give_up(error)
            return None

    def _ready(self, session: Session, drafter: Drafter | None, choice_1: Tensor) -> StaticSteps:
        kind = Kind(drafts=drafter is not None, sampled=session.sampled)
        size = 1 if drafter is None else drafter.shape.block_size
        num_tokens = len(session.prompt_P) + session.limits.max_new_tokens + size
        buffers = self._buffers_of(num_rows(max(num_tokens, WARM_UP_RUNS * size)), session)
        if drafter is not None:
            self._attach(drafter, buffers)
        if kind not in buffers.launches:
            buffers.rewind(0, choice_1)
            launch = self._make_launch(buffers.body(kind, size))
            buffers.load(session, choice_1, drafts=kind.drafts)
            _check(launch, buffers, kind, session=session)
            buffers.launches[kind] = launch
        return StaticSteps(buffers, kind, session=session, choice_1=choice_1)

    def _buffers_of(self, rows: int, session: Session) -> StaticBuffers:
        found = self._buffers.pop(rows, None)
        if found is None:
            if self._twin is None:
                self._twin = StaticTarget(self._target)
            self._make_room(rows_bytes(session.cache, rows))
            new = StaticRows(session.cache, rows)
            found = StaticBuffers(self._target, self._twin, new)
        self._buffers[rows] = found
        return found

    def _make_room(self, new_bytes: int) -> None:
        held = sum(buffers.num_bytes for buffers in self._buffers.values())
        for rows in list(self._buffers):
            if held + new_bytes > self._kept_bytes:
                held -= self._buffers.pop(rows).num_bytes

    def _attach(self, drafter: Drafter, buffers: StaticBuffers) -> None:
        """Graphs read weights where they were: others, or the same elsewhere, need new graphs."""
        weights = tuple(parameter.data_ptr() for parameter in drafter.parameters())
        if drafter is not self._drafter or weights != self._weights:
            for other in self._buffers.values():
                other.detach()
            self._drafter, self._weights = drafter, weights
        if not buffers.drafts:
            buffers.attach(drafter)

    def _make_launch(self, body: Launch) -> Launch:
        if self._launch is not None:
            return self._launch(body)
        if self._capturer is None:
            from dflash.decode.capture import Capturer

            self._capturer = Capturer(self._device, warm_up_runs=WARM_UP_RUNS)
        launch: Launch = self._capturer(body)
        return launch

    def _give_up(self, error: Exception) -> None:
        self.eager_because = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        self._buffers.clear()
        self._twin = self._capturer = self._drafter = None
        warnings.warn(
            f"decoding runs eagerly, several times slower: {self.eager_because}",
            RuntimeWarning,
            stacklevel=2,
        )


def num_rows(num_tokens: int) -> int:
    """The rows of the buffers that serve so many tokens: 128, 256, 512, ..."""
    rows = MIN_ROWS
    while rows < num_tokens:
        rows *= 2
    return rows


def static_bytes(config: Any, shape: DrafterShape, *, num_tokens: int, item_bytes: int) -> int:  # noqa: ANN401
    """What a target of this text config and a drafter keep for texts of so many tokens.

    Exact for the rows of a target whose layers are alike; the graphs' own pool, a few logits and
    activations of one block, comes on top of it.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_target = int(config.num_hidden_layers) * int(heads) * int(width)
    of_drafter = shape.num_layers * shape.num_kv_heads * shape.head_dim
    return 2 * item_bytes * num_rows(num_tokens) * (of_target + of_drafter)


def _check(launch: Launch, buffers: StaticBuffers, kind: Kind, *, session: Session) -> None:
    """Take one step from the loaded prompt and compare its logits with an eager forward's.

    Raises:
        NotStaticError: they differ by more than rounding.
    """
    buffers.draw_races(kind, torch.Generator(session.device).manual_seed(0))
    launch()
    block_B, logits_BV = buffers.seen[kind]
    with session.rehearsal():
        eager_BV = session.logits(block_B).float()
    spread_B = (eager_BV - eager_BV.mean(dim=-1, keepdim=True)).square().mean(dim=-1).sqrt()
    error_B = (logits_BV.float() - eager_BV).square().mean(dim=-1).sqrt()
    error = (error_B / spread_B).median().item()
    limit = TOLERANCE.get(logits_BV.dtype, TOLERANCE[torch.bfloat16])
    if not error <= limit:
        raise NotStaticError(
            f"the captured step's logits are off by {error:.3g} of their spread, over {limit:g}"
        )
