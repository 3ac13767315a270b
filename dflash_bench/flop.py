"""How many floating-point operations a training step of a drafter is, from its shape alone.

A product of [m, k] and [k, n] counts 2 * m * k * n. Forward and backward together count three
times the forward, as rivals' figures do; norms, rotary positions, softmax, the optimizer and what a
kernel computes twice (attention's scores, in the backward pass) count nothing.
"""

from dataclasses import dataclass

from dflash_bench.shapes import BenchShape

FORWARD_AND_BACKWARD = 3
FORWARD_AND_DX = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlop:
    """The parts of one step.

    Attributes:
        layers: every matrix product of the draft layers over all N * B slots.
        lm_head: the frozen head's logits and dX, of slots 1 to B - 1.
        lm_head_slot_0: the same of slot 0, which this project never runs and rivals do.
        context: fusing the features, and every layer's keys and values of the context.
        features_dx: the gradient of the features, which a frozen target has no use for.
        attention: scores and weighted values over pairs of a slot and a row it may read.
    """

    layers: float
    lm_head: float
    lm_head_slot_0: float
    context: float
    features_dx: float
    attention: float

    @property
    def model(self) -> float:
        """All parts: what the step is said to be worth, the same for every implementation."""
        return self.needed + self.lm_head_slot_0 + self.features_dx

    @property
    def needed(self) -> float:
        """What has to be computed: neither the head on slot 0 nor the gradient of the features."""
        return self.layers + self.lm_head + self.context + self.attention


def step_flop(shape: BenchShape) -> StepFlop:
    """Count one step at *shape*; attention by the mean over the anchors that may be drawn."""
    drafter, context_rows = shape.drafter, shape.token_budget
    slots = shape.num_anchors * drafter.block_size
    width = drafter.hidden_size
    q_width = drafter.num_heads * drafter.head_dim
    kv_width = drafter.num_kv_heads * drafter.head_dim
    layer = 2 * width * q_width + 2 * width * kv_width + 3 * width * drafter.intermediate_size
    head = FORWARD_AND_DX * 2 * width * drafter.vocab_size
    fuse = 2.0 * context_rows * drafter.num_taps * width * width
    keys_values = 2.0 * context_rows * drafter.num_layers * 2 * width * kv_width
    attended = drafter.num_layers * 2 * 2 * q_width * visible_pairs(shape)
    return StepFlop(
        layers=FORWARD_AND_BACKWARD * 2.0 * slots * drafter.num_layers * layer,
        lm_head=1.0 * head * (slots - shape.num_anchors),
        lm_head_slot_0=1.0 * head * shape.num_anchors,
        context=2 * fuse + FORWARD_AND_BACKWARD * keys_values,
        features_dx=fuse,
        attention=FORWARD_AND_BACKWARD * attended,
    )


def visible_pairs(shape: BenchShape) -> float:
    """Expected pairs of a slot and a row it may read: the context before its anchor, its block.

    Anchors are drawn evenly from positions 1 to L - 2 of documents of equal length L.
    """
    mean_context = (shape.token_budget / shape.num_documents - 1) / 2
    slots = shape.num_anchors * shape.drafter.block_size
    return slots * (mean_context + shape.drafter.block_size)
