"""One target's way of filling feature slots: host batch -> forward to the last tap -> slot."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.data.batch import PackedBatch
from dflash.drafter.training import StepInputs
from dflash.execution import on_stream
from dflash.pipeline.idle import StreamIdle
from dflash.pipeline.slots import BatchFacts, FeatureSlot, HostSlot
from dflash.target.model import Target


@dataclass(slots=True)
class _Staging:
    """A target's own copy of a batch, where the drafter lives on another device."""

    inputs: StepInputs
    computed: torch.cuda.Event
    copied: torch.cuda.Event


class TargetLane:
    """Runs one target on one device; used by one worker thread.

    On the drafter's own device the forward writes straight into the slot. Otherwise it writes into
    one of two staging buffers, and a side stream copies to the slot (peer to peer where the
    devices are peers) while the next forward runs.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.device = torch.device(target.device)
        self._stagings: list[_Staging] = []
        self._turn = 0
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.idle = StreamIdle()

    def run(self, host: HostSlot, slot: FeatureSlot) -> None:
        """Fill *slot* from *host*; on CUDA both are guarded by events, and this returns at once."""
        batch = host.batch
        assert batch is not None, "the ring published an empty host slot"
        slot.facts = BatchFacts(
            number=batch.number,
            num_real_tokens=batch.num_real_tokens,
            num_supervised_tokens=batch.num_supervised_tokens,
            num_documents=batch.num_documents,
            rows=tuple(batch.rows),
        )
        if self.stream is None:
            self._run_on_cpu(batch, slot)
        elif slot.inputs.features_TC.device == self.device:
            self._run_in_place(host, batch, slot)
        else:
            self._run_staged(host, batch, slot)

    def _run_on_cpu(self, batch: PackedBatch, slot: FeatureSlot) -> None:
        near = slot.inputs.features_TC.device == self.device
        inputs = slot.inputs if near else _like(slot.inputs, self.device)
        _write_inputs(inputs, batch)
        self._forward(inputs, batch)
        if near:
            return
        assert slot.free is not None
        assert slot.ready is not None
        with on_stream(slot.copy_stream):
            slot.free.wait()
            _copy_inputs(slot.inputs, inputs)
            slot.ready.record()

    def _run_in_place(self, host: HostSlot, batch: PackedBatch, slot: FeatureSlot) -> None:
        assert slot.free is not None
        assert slot.ready is not None
        with on_stream(self.stream):
            with self.idle.waiting():
                slot.free.wait()
            _write_inputs(slot.inputs, batch)
            if host.copied is not None:
                host.copied.record()
            self._forward(slot.inputs, batch)
            slot.ready.record()

    def _run_staged(self, host: HostSlot, batch: PackedBatch, slot: FeatureSlot) -> None:
        staging = self._next_staging(slot)
        with on_stream(self.stream):
            with self.idle.waiting():
                staging.copied.wait()
            _write_inputs(staging.inputs, batch)
            if host.copied is not None:
                host.copied.record()
            self._forward(staging.inputs, batch)
            staging.computed.record()
        with ExitStack() as on_side_streams:
            # A copy between devices also waits for the destination's *current* stream, so the
            # destination gets a side stream of its own, never the one its drafter computes on.
            if slot.copy_stream is not None:
                on_side_streams.enter_context(on_stream(slot.copy_stream))
                assert slot.free is not None
                slot.free.wait()
            on_side_streams.enter_context(on_stream(self._copy_stream))
            staging.computed.wait()
            _copy_inputs(slot.inputs, staging.inputs)
            staging.copied.record()
        if slot.ready is None:
            staging.copied.synchronize()  # a CPU drafter reads without events
        else:
            with on_stream(slot.copy_stream):
                staging.copied.wait()
                slot.ready.record()

    def _next_staging(self, slot: FeatureSlot) -> _Staging:
        if not self._stagings:
            self._copy_stream = torch.cuda.Stream(self.device)
            self._stagings = [
                _Staging(_like(slot.inputs, self.device), torch.cuda.Event(), torch.cuda.Event())
                for _ in range(2)
            ]
        self._turn += 1
        return self._stagings[self._turn % 2]

    def _forward(self, inputs: StepInputs, batch: PackedBatch) -> None:
        with self.target.lock:
            self.target.features(
                inputs.tokens_T,
                inputs.positions_T,
                inputs.documents_T,
                cu_lengths=batch.cu_lengths,
                out=inputs.features_TC,
            )


def _write_inputs(inputs: StepInputs, batch: PackedBatch) -> None:
    inputs.tokens_T.copy_(batch.tokens_T, non_blocking=True)
    inputs.documents_T.copy_(batch.documents_T, non_blocking=True)
    inputs.positions_T.copy_(batch.positions_T, non_blocking=True)
    inputs.loss_mask_T.copy_(batch.loss_mask_T, non_blocking=True)
    inputs.batch_number.fill_(batch.number)


def _copy_inputs(destination: StepInputs, source: StepInputs) -> None:
    for into, out_of in zip(destination, source, strict=True):
        into.copy_(out_of, non_blocking=True)


def _like(inputs: StepInputs, device: torch.device) -> StepInputs:
    empty: list[Tensor] = [torch.empty_like(tensor, device=device) for tensor in inputs]
    return StepInputs(*empty)
