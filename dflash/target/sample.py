"""The target writes: batched generation, used by ``dflash data synthesize``.

All rows advance together, one token a step; choosing, storing and stopping stay on the device. On
CUDA the step is captured once as a graph and replayed, since a step of a small model is mostly
the time Python needs to launch it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.errors import UsageError
from dflash.target.model import Target
from dflash.target.sharing import register_attention, sharing_copy
from dflash.target.stored import STORED, KeyValueStore, attend_to, stored_attention

ROUND_TO = 64
"""Buffers are made for this many rows or prompt tokens more or less, so that most batches share
them; what a batch yields depends on their size, so never on which batches came before."""

LOOK_EVERY = 16
"""Steps between two looks at whether every row has ended; a look waits for the device."""

GREEDY_BELOW = 1e-5
WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimits:
    """How to choose and when to stop; temperature 0 is greedy, top_p 1 keeps every token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature must be 0 or a positive number, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must lie in (0, 1], got {self.top_p}")


def sample_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop_ids: Sequence[int],
) -> list[list[int]]:
    """Continue every prompt once. For many batches keep a ``SampleBatches`` instead."""
    return SampleBatches(target)(
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_ids=stop_ids,
    )


class SampleBatches:
    """``sample_batch`` of one target, which keeps the buffers and graphs of each kind of request.

    Args:
        target: the model that writes.
        graph: as for ``Sampler``.
    """

    def __init__(self, target: Target, *, graph: bool | None = None) -> None:
        self._target = target
        self._graph = graph
        self._samplers: dict[SampleLimits, Sampler] = {}

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: Sequence[int],
    ) -> list[list[int]]:
        limits = SampleLimits(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_ids=tuple(stop_ids),
        )
        if limits not in self._samplers:
            self._samplers[limits] = Sampler(self._target, limits, graph=self._graph)
        return self._samplers[limits].sample(prompts, seed=seed)


class Sampler:
    """Buffers and a graph for batches of one size; a batch of another size makes new ones.

    Args:
        target: the model that writes.
        limits: how it chooses and stops.
        graph: capture the step; default yes on CUDA, except for mixtures of experts, whose
            routing waits for the device.
    """

    def __init__(self, target: Target, limits: SampleLimits, *, graph: bool | None = None) -> None:
        register_attention(STORED, stored_attention)
        experts = getattr(target.config, "num_experts", None) or getattr(
            target.config, "num_local_experts", None
        )
        on_cuda = target.device.type == "cuda"
        self._target = target
        self._limits = limits
        self._graphed = on_cuda and (not experts if graph is None else graph)
        self._model = sharing_copy(target.model, attention=STORED)
        self._generator = torch.Generator(target.device)
        self._batch: _Batch | None = None

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], *, seed: int) -> list[list[int]]:
        """Continue each prompt.

        Returns:
            the new tokens of each, cut after the first stop id. The same seed and the same batch
            give the same tokens on the same machine.

        Raises:
            UsageError: a prompt is empty or holds an id outside the vocabulary.
        """
        if not prompts:
            return []
        _check(prompts, self._target.vocab_size)
        num_rows = len(prompts) if len(prompts) < ROUND_TO else _rounded(len(prompts))
        size = num_rows, _rounded(max(len(prompt) for prompt in prompts))
        if self._batch is None or self._batch.size != size:
            self._batch = None  # its buffers are freed before new ones are made
            self._batch = _Batch(
                self._model,
                self._generator,
                limits=self._limits,
                size=size,
                graphed=self._graphed,
            )
        self._generator.manual_seed(seed)
        return self._batch.run(prompts)


class _Batch:
    """One set of buffers: R rows, a number of prompt columns, then one column a new token."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401 (a transformers model)
        generator: torch.Generator,
        *,
        limits: SampleLimits,
        size: tuple[int, int],
        graphed: bool,
    ) -> None:
        self.size = size
        num_rows, num_prompt_columns = size
        self._model = model
        self._generator = generator
        self._limits = limits
        device = generator.device
        self._store = KeyValueStore(
            num_rows=num_rows,
            num_columns=_rounded(num_prompt_columns + limits.max_new_tokens),
            device=device,
        )
        self._stops_S = torch.tensor(limits.stop_ids, dtype=torch.int64, device=device)
        self._token_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._ended_R = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._written = torch.zeros((), dtype=torch.int64, device=device)
        self._out_RN = torch.zeros(
            num_rows, limits.max_new_tokens, dtype=torch.int64, device=device
        )
        self._graph = self._capture() if graphed else None

    def run(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        self._read(prompts)
        for step in range(1, self._limits.max_new_tokens):
            if step % LOOK_EVERY == 0 and bool(self._ended_R.all()):
                break
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        num_written = int(self._written)
        rows = self._out_RN[: len(prompts), :num_written].tolist()
        return [self._cut(row) for row in rows]

    def _read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read the prompts, ending at the same column, and choose the first new tokens."""
        (rows, width), store = self.size, self._store
        filled = [*prompts, *[prompts[0]] * (rows - len(prompts))]
        padded = torch.tensor([[0] * (width - len(p)) + list(p) for p in filled])
        ids_RP = padded.to(self._token_R.device)
        store.first_R.copy_(torch.tensor([width - len(p) for p in filled]))
        store.column.zero_()
        self._written.zero_()
        self._ended_R.zero_()
        self._ended_R[len(prompts) :] = True  # rows that only fill the batch
        columns_P = torch.arange(width, device=ids_RP.device)
        positions_RP = (columns_P - store.first_R[:, None]).clamp(min=0)
        self._commit(self._logits(ids_RP, positions_RP))
        store.column.fill_(width)

    def _step(self) -> None:
        """Advance every row by one token; nothing but tensors on the device."""
        positions_R1 = (self._store.column - self._store.first_R)[:, None]
        self._commit(self._logits(self._token_R[:, None], positions_R1))
        self._store.column.add_(1)

    def _logits(self, ids_Rn: Tensor, positions_Rn: Tensor) -> Tensor:
        with attend_to(self._store):
            output = self._model(
                input_ids=ids_Rn, position_ids=positions_Rn, use_cache=False, logits_to_keep=1
            )
        logits_RV: Tensor = output.logits[:, -1]
        return logits_RV

    def _commit(self, logits_RV: Tensor) -> None:
        chosen_R = _choose(logits_RV, self._limits, self._generator)
        self._out_RN.index_copy_(1, self._written[None], chosen_R[:, None])
        self._token_R.copy_(chosen_R)
        self._ended_R.logical_or_((chosen_R[:, None] == self._stops_S).any(dim=1))
        self._written.add_(1)

    def _cut(self, row: list[int]) -> list[int]:
        stops = self._limits.stop_ids
        end = next((i for i, token in enumerate(row) if token in stops), len(row) - 1)
        return row[: end + 1]

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture one step on throw-away state; ``_read`` resets all of it."""
        for _ in range(WARMUP_STEPS):
            self._written.zero_()
            self._step()
        self._written.zero_()
        device = self._token_R.device
        # Graph, stream and what the generator keeps for it are otherwise the thread's own device's.
        with torch.cuda.device(device):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
            graph.register_generator_state(self._generator)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._step()
        return graph


def _choose(logits_RV: Tensor, limits: SampleLimits, generator: torch.Generator) -> Tensor:
    """Return int64 [R]: the best token, or a draw from the smallest set that holds top_p."""
    if limits.temperature < GREEDY_BELOW:
        return logits_RV.argmax(dim=-1)
    if limits.top_p >= 1.0:
        shares_RV = torch.softmax(logits_RV.float() / limits.temperature, dim=-1)
        return _draw(shares_RV, generator)
    sorted_RV, ids_RV = logits_RV.sort(dim=-1, descending=True)
    shares_RV = torch.softmax(sorted_RV.float() / limits.temperature, dim=-1)
    before_RV = shares_RV.cumsum(dim=-1) - shares_RV
    kept_RV = shares_RV.masked_fill(before_RV >= limits.top_p, 0.0)
    return ids_RV.gather(1, _draw(kept_RV, generator)[:, None])[:, 0]


def _draw(shares_RV: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one index a row: the argmax of share / Exp(1), one kernel without host sync."""
    races_RV = torch.empty_like(shares_RV).exponential_(generator=generator)
    return (shares_RV / races_RV).argmax(dim=-1)


def _rounded(count: int) -> int:
    return -(-count // ROUND_TO) * ROUND_TO


def _check(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {number} is empty: generation needs at least one token")
        wrong = [token for token in prompt if not 0 <= token < vocab_size]
        if wrong:
            raise UsageError(
                f"prompt {number}: token {wrong[0]} is outside the vocabulary [0, {vocab_size})"
            )
