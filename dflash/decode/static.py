"""One step over static buffers: draft, verify, accept and extend, all of it on the device.

A body is captured once and replayed for every step of every prompt that its rows have room for; the
host reads one small tensor a step. A body reads no number on the host and allocates nothing that
outlives it, except that the logits stay until the next replay, for ``Replays`` to compare.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from dflash.decode.choice import agreeing, drawn
from dflash.decode.eager import Session
from dflash.decode.proposer import Proposer, compute_dtype
from dflash.decode.rows import StaticRows, StaticTarget
from dflash.drafter.cache import StaticContext
from dflash.drafter.model import Drafter

if TYPE_CHECKING:
    from dflash.target.model import Target

Launch = Callable[[], None]
"""Runs a body once: by replaying its graph, or by calling it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Which body: with the drafter or one token a step, by sampling or greedily."""

    drafts: bool
    sampled: bool


class StaticBuffers:
    """Static rows of one number of tokens, and the step bodies over them.

    ``length_1`` counts the tokens whose keys are there, in the target and in the drafter's context
    alike; ``anchor_1`` is the token after them. ``seen`` holds, for every kind of step, the block
    it last ran over and the target's logits.
    """

    def __init__(self, target: "Target", twin: StaticTarget, rows: StaticRows) -> None:
        self._target = target
        self._twin = twin
        self._proposer: Proposer | None = None
        self._context: StaticContext | None = None
        self.rows = rows
        device = torch.device(target.device)
        self.length_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.anchor_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._temperature_1 = torch.ones(1, device=device)
        self._offsets_B: dict[Kind, Tensor] = {}
        self._races_BV: dict[Kind, Tensor] = {}
        self._results: dict[Kind, Tensor] = {}
        self.seen: dict[Kind, tuple[Tensor, Tensor]] = {}
        self.launches: dict[Kind, Launch] = {}

    @property
    def num_bytes(self) -> int:
        context = 0 if self._context is None else self._context.num_bytes
        return self.rows.num_bytes + context + sum(r.nbytes for r in self._races_BV.values())

    @property
    def drafts(self) -> bool:
        """A drafter is attached."""
        return self._context is not None

    def detach(self) -> None:
        """Forget the drafter, and every body that drafts."""
        self._context = self._proposer = None
        for kind in [kind for kind in self.launches if kind.drafts]:
            held = (self.launches, self.seen, self._offsets_B, self._races_BV, self._results)
            for of_kind in held:
                of_kind.pop(kind, None)

    def attach(self, drafter: Drafter) -> None:
        """Draft with this drafter."""
        shape = drafter.shape
        device = self.length_1.device
        self._context = StaticContext(
            shape,
            max_tokens=self.rows.num_rows - shape.block_size,
            device=device,
            dtype=compute_dtype(self._target),
        )
        self._proposer = Proposer(self._target, drafter, self._context)

    def body(self, kind: Kind, size: int) -> Launch:
        """Return the step of *size* tokens as a call without arguments.

        What outlives a step is allocated here and held as long as the body's graph may be: a graph
        keeps addresses, not tensors.
        """
        device = self.length_1.device
        self._offsets_B[kind] = torch.arange(size, device=device)
        self._results[kind] = torch.zeros(size + 1, dtype=torch.int64, device=device)
        if kind.sampled:
            self._races_BV[kind] = torch.ones(size, self._target.vocab_size, device=device)
        return lambda: self._step(kind)

    def load(self, session: Session, choice_1: Tensor, *, drafts: bool) -> None:
        """Begin a prompt: its prefilled cache, its features, its first token."""
        self.rows.load(session.cache)
        if drafts:
            assert self._context is not None
            assert self._proposer is not None
            self._context.clear()
            positions_P = torch.arange(len(session.prompt_P), device=self.length_1.device)
            self._proposer.extend(session.features(len(positions_P)), positions_P)
        self._temperature_1.fill_(session.limits.temperature)
        self.rewind(len(session.prompt_P), choice_1)

    def rewind(self, length: int, anchor_1: Tensor) -> None:
        """Go on from this length: rows behind it are as if they had never been written."""
        self.length_1.fill_(length)
        self.anchor_1.copy_(anchor_1)

    def draw_races(self, kind: Kind, generator: torch.Generator) -> None:
        """Draw what the next step samples by; outside of any capture, from the caller's own."""
        if kind.sampled:
            self._races_BV[kind].exponential_(generator=generator)

    def read(self, kind: Kind) -> tuple[int, list[int]]:
        """Wait for the last step; return how many drafts it accepted, and the target's choices."""
        num_drafts, *choices = self._results[kind].tolist()  # the step's one host sync
        return num_drafts, choices

    def _step(self, kind: Kind) -> None:
        positions_B = self.length_1 + self._offsets_B[kind]
        if kind.drafts:
            assert self._proposer is not None
            block_B = self._proposer.block(self.anchor_1, positions_B)
        else:
            block_B = self.anchor_1.clone()
        logits_BV, features_BC = self._twin.forward(block_B, positions_B, self.rows)
        self.seen[kind] = block_B, logits_BV
        if kind.sampled:
            races_BV = self._races_BV[kind]
            choice_B = drawn(logits_BV, temperature=self._temperature_1, races_BV=races_BV)
        else:
            choice_B = logits_BV.argmax(dim=-1)
        agree_1 = agreeing(block_B, choice_B)
        if kind.drafts:
            assert self._proposer is not None
            self._proposer.extend(features_BC, positions_B)  # rejected rows get overwritten
        self._results[kind].copy_(torch.cat([agree_1, choice_B]))
        self.anchor_1.copy_(choice_B.index_select(0, agree_1))
        self.length_1.add_(agree_1 + 1)


class StaticSteps:
    """The loop's steps of one prompt, as launches over static buffers."""

    def __init__(
        self, buffers: StaticBuffers, kind: Kind, *, session: Session, choice_1: Tensor
    ) -> None:
        self._buffers = buffers
        self._kind = kind
        self._session = session
        self._choice_1 = choice_1
        self._launch = buffers.launches[kind]

    def load(self) -> Self:
        """Put the prefilled prompt into the buffers."""
        self._buffers.load(self._session, self._choice_1, drafts=self._kind.drafts)
        return self

    def advance(self) -> tuple[int, list[int]]:
        """Verify one block; return how many drafts were accepted, and the target's choices."""
        self._buffers.draw_races(self._kind, self._session.generator)
        self._launch()
        return self._buffers.read(self._kind)
