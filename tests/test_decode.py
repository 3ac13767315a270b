"""Decoding with a drafter gives the target's own text, only in fewer target forwards."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from decode_cases import (
    AS_THE_TARGET,
    PROMPTS,
    Forecaster,
    Watched,
    distance_from_the_target,
    own_text,
)
from safetensors.torch import load_file
from tiny_models import BLOCK, CONFIGS, MASK, SIZES, VOCAB, as_target, tiny_drafter, tiny_target
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.decode import DecodeLimits, plain_decode, speculative_decode
from dflash.drafter.model import Drafter
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.training import BlockLoss, StepInputs
from dflash.drafter.zlab import from_zlab
from dflash.errors import UsageError
from dflash.target.model import Target
from dflash.target.shape import default_shape

GOLDEN = Path(__file__).parent / "golden"


def test_the_golden_generation_is_reproduced() -> None:
    golden = load_file(GOLDEN / "golden.safetensors")
    shape = from_zlab(json.loads((GOLDEN / "config.json").read_text()))
    drafter = Drafter(shape).eval()
    drafter.load_state_dict(load_file(GOLDEN / "model.safetensors"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN / "target", dtype=torch.float32
    )
    prompt, output = golden["gen_prompt"][0].tolist(), golden["gen_output_greedy"][0].tolist()
    limits = DecodeLimits(max_new_tokens=len(output) - len(prompt))
    decoded = speculative_decode(
        as_target(model, shape.target_layer_ids), drafter, prompt, limits=limits
    )
    assert prompt + decoded.tokens == output


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_text_is_the_targets_own_token_for_token(name: str, prompt: list[int]) -> None:
    target = tiny_target(CONFIGS[name]())
    expected = own_text(target, prompt, 30)
    limits = DecodeLimits(max_new_tokens=30)
    assert plain_decode(target, prompt, limits=limits).tokens == expected
    assert speculative_decode(target, tiny_drafter(), prompt, limits=limits).tokens == expected
    lengths = set()
    for wrong_every in (2, 3, 7, 11):
        forecaster = Forecaster(tiny_drafter().shape).knows(
            target, prompt + own_text(target, prompt, 50), wrong_every
        )
        decoded = speculative_decode(target, forecaster, prompt, limits=limits)
        assert decoded.tokens == expected
        lengths.update(decoded.accepted)
    assert len(lengths) >= 4, "accepts of several lengths were exercised"


@pytest.mark.parametrize("text", ["import os\n", "def main(argv):\n    return"])
def test_the_shipped_target_writes_its_own_text_and_is_left_as_it_was(text: str) -> None:
    target = Target.load("stdlib-lm", taps=2, device="cpu", dtype=torch.float32)
    drafter = Drafter(default_shape(target, DrafterConfig(num_layers=1, block_size=4)))
    drafter.initialise(0)
    prompt = target.tokenizer(text)["input_ids"]
    limits = DecodeLimits(max_new_tokens=24, stop_ids=target.stop_ids)
    decoded = speculative_decode(target, drafter.eval(), prompt, limits=limits)
    assert decoded.tokens == own_text(target, prompt, 24)
    assert not any(module._forward_hooks for module in target.model.modules())  # noqa: SLF001
    assert target.lock.acquire(blocking=False), "the lock is free again"


def test_a_drafter_that_knows_the_text_has_every_slot_accepted() -> None:
    target = tiny_target(CONFIGS["llama"]())
    text = PROMPTS[1] + own_text(target, PROMPTS[1], 60)
    forecaster = Forecaster(tiny_drafter().shape).knows(target, text, 10**9)
    decoded = speculative_decode(
        target, forecaster, PROMPTS[1], limits=DecodeLimits(max_new_tokens=31)
    )
    assert decoded.accepted == [BLOCK] * 5
    assert decoded.tau == BLOCK
    assert decoded.finished_by == "length"


def test_the_last_step_counts_in_full_though_its_tokens_are_cut() -> None:
    target = tiny_target(CONFIGS["llama"]())
    text = PROMPTS[1] + own_text(target, PROMPTS[1], 60)
    forecaster = Forecaster(tiny_drafter().shape).knows(target, text, 10**9)
    limits = DecodeLimits(max_new_tokens=10)  # 1 from the prefill, 6, and 3 of the last 6
    decoded = speculative_decode(target, forecaster, PROMPTS[1], limits=limits)
    assert (len(decoded.tokens), decoded.accepted) == (10, [6, 6])


def test_the_text_ends_with_the_first_stop_id() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    text = own_text(target, PROMPTS[2], 30)
    stop = next(token for token in text[4:] if token not in text[:4])
    limits = DecodeLimits(max_new_tokens=30, stop_ids=(stop,))
    expected = text[: text.index(stop) + 1]
    for decoded in (
        speculative_decode(target, tiny_drafter(), PROMPTS[2], limits=limits),
        plain_decode(target, PROMPTS[2], limits=limits),
    ):
        assert (decoded.tokens, decoded.finished_by) == (expected, "stop")


def test_an_answer_of_one_token_has_no_verify_step_and_no_tau() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    decoded = speculative_decode(
        target, tiny_drafter(), [1, 2], limits=DecodeLimits(max_new_tokens=1)
    )
    assert (decoded.accepted, decoded.tau, decoded.num_decoded) == ([], None, 0)


def test_committed_blocks_are_told_in_order() -> None:
    target = tiny_target(CONFIGS["llama"]())
    text = PROMPTS[1] + own_text(target, PROMPTS[1], 60)
    forecaster = Forecaster(tiny_drafter().shape).knows(target, text, 4)
    blocks: list[tuple[list[int], int]] = []
    decoded = speculative_decode(
        target,
        forecaster,
        PROMPTS[1],
        limits=DecodeLimits(max_new_tokens=25),
        on_block=lambda tokens, accepted: blocks.append((tokens, accepted)),
    )
    assert [token for tokens, _ in blocks for token in tokens] == decoded.tokens
    assert blocks[0] == (decoded.tokens[:1], 0)
    assert [accepted + 1 for _, accepted in blocks[1:-1]] == decoded.accepted[:-1]


def test_the_incremental_context_equals_one_forward_over_everything_committed() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    drafter = Watched(tiny_drafter().shape)
    drafter.load_state_dict(tiny_drafter().state_dict())
    prompt = PROMPTS[1]
    decoded = speculative_decode(target, drafter, prompt, limits=DecodeLimits(max_new_tokens=12))
    ids_T = torch.tensor(prompt + decoded.tokens)
    with torch.no_grad():
        hidden = target.model(ids_T[None], output_hidden_states=True).hidden_states
    features_TC = torch.cat([hidden[tap + 1][0] for tap in target.taps], dim=-1)
    assert len(drafter.seen) == len(decoded.accepted) >= 3
    for positions, out_BD in drafter.seen:
        anchor = positions[0]
        assert positions == list(range(anchor, anchor + BLOCK))
        block = torch.full((BLOCK,), MASK)
        block[0] = ids_T[anchor]
        expected = drafter(
            target.embedding_VD[block][None],
            features_TC[None, :anchor],
            positions_bT=torch.arange(anchor)[None],
            positions_bQ=torch.tensor([positions]),
            mask=torch.ones(BLOCK, anchor + BLOCK, dtype=torch.bool),
            attention="eager",
        )[0]
        torch.testing.assert_close(out_BD, expected, rtol=1e-4, atol=1e-5)


def test_sampled_text_is_distributed_as_the_targets_own() -> None:
    assert distance_from_the_target(speculative_decode, seed=7) < AS_THE_TARGET


def test_sampling_repeats_with_its_generator_and_leaves_the_global_state_alone() -> None:
    target = tiny_target(CONFIGS["llama"]())
    limits = DecodeLimits(max_new_tokens=12, temperature=1.0)
    before = torch.get_rng_state()
    texts = [
        speculative_decode(
            target,
            tiny_drafter(),
            PROMPTS[2],
            limits=limits,
            generator=torch.Generator().manual_seed(seed),
        ).tokens
        for seed in (1, 1, 2)
    ]
    speculative_decode(target, tiny_drafter(), PROMPTS[2], limits=limits)
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(before, torch.get_rng_state())


def test_a_target_whose_state_cannot_be_rolled_back_is_refused() -> None:
    config = transformers.Lfm2Config(
        **(SIZES | {"num_hidden_layers": 2}), layer_types=["conv", "full_attention"]
    )
    target = tiny_target(config)
    with pytest.raises(UsageError, match=r"lfm2.*conv layers.*cannot be rolled back"):
        speculative_decode(target, tiny_drafter(), [1], limits=DecodeLimits())


@pytest.mark.parametrize(
    ("prompt", "says"), [([], "the prompt is empty"), ([1, VOCAB], f"prompt token {VOCAB} is out")]
)
def test_a_prompt_that_cannot_be_decoded_is_named(prompt: list[int], says: str) -> None:
    target = tiny_target(CONFIGS["llama"]())
    with pytest.raises(UsageError, match=says):
        speculative_decode(target, tiny_drafter(), prompt, limits=DecodeLimits())


@pytest.mark.parametrize(
    "limits", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}]
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be"):
        DecodeLimits(**limits)


@pytest.mark.slow
def test_a_drafter_overfitted_to_one_text_is_accepted_in_nearly_full_blocks() -> None:
    """Catches every shift, mask or rotary mismatch between training and decoding."""
    target = tiny_target(CONFIGS["qwen3"]())
    prompt = PROMPTS[1]
    text = torch.tensor(prompt + own_text(target, prompt, 80))
    with torch.no_grad():
        hidden = target.model(text[None], output_hidden_states=True).hidden_states
    drafter = tiny_drafter().train()
    features_TC = torch.cat([hidden[tap + 1][0] for tap in target.taps], dim=-1)
    overfit(drafter, target, text, features_TC=features_TC)
    limits = DecodeLimits(max_new_tokens=60)
    decoded = speculative_decode(target, drafter.eval(), prompt, limits=limits)
    assert decoded.tokens == text[len(prompt) :][:60].tolist()
    assert decoded.tau is not None
    assert decoded.tau > 0.9 * BLOCK


def overfit(drafter: Drafter, target: "Target", text_T: Tensor, *, features_TC: Tensor) -> None:
    length = len(text_T)
    loss = BlockLoss(
        drafter,
        embedding_VD=target.embedding_VD,
        head=target.lm_head_VD,
        settings=ObjectiveSettings(),
        num_anchors=64,
        seed=0,
        attention="sdpa",
        checkpoint=False,
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    for number in range(300):
        inputs = StepInputs(
            features_TC=features_TC,
            tokens_T=text_T,
            documents_T=torch.zeros(length, dtype=torch.int64),
            positions_T=torch.arange(length),
            loss_mask_T=torch.ones(length, dtype=torch.bool),
            batch_number=torch.tensor(number),
        )
        objective = loss(inputs, with_metrics=False)
        optimizer.zero_grad()
        (objective.loss_sum / objective.weight_sum).backward()
        optimizer.step()
