"""Decoding and evaluating on a GPU: the same text in fp32, and no trace left in bf16."""

import pytest
import torch

from dflash.config import DrafterConfig
from dflash.decode import DecodeLimits, plain_decode, speculative_decode
from dflash.drafter.model import Drafter
from dflash.target.model import Target
from dflash.target.shape import default_shape
from dflash.train.evaluation import EvalSettings, evaluate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TEXTS = ["import os\n", "def main(argv):\n    return", "class Reader:\n    def __init__(self"]


def shipped(dtype: torch.dtype) -> tuple[Target, Drafter]:
    target = Target.load("stdlib-lm", taps=2, device="cuda:0", dtype=dtype)
    drafter = Drafter(default_shape(target, DrafterConfig(num_layers=2, block_size=8)))
    drafter.initialise(0)
    return target, drafter.to("cuda:0")


@pytest.mark.parametrize("text", TEXTS)
def test_greedy_text_in_fp32_is_the_targets_own(text: str) -> None:
    target, drafter = shipped(torch.float32)
    prompt = target.tokenizer(text)["input_ids"]
    ids = torch.tensor([prompt], device="cuda:0")
    own = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64
    )[0, len(prompt) :].tolist()
    limits = DecodeLimits(max_new_tokens=64, stop_ids=target.stop_ids)
    assert plain_decode(target, prompt, limits=limits).tokens == own
    assert speculative_decode(target, drafter.eval(), prompt, limits=limits).tokens == own


def test_evaluating_in_bf16_copies_the_masters_and_leaves_the_random_state_alone() -> None:
    target, drafter = shipped(torch.bfloat16)
    prompts = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    settings = EvalSettings(max_new_tokens=16, temperature=1.0, num_plain_prompts=1)
    result = evaluate(target, drafter.train(), prompts, settings=settings)
    assert 1.0 <= result.tau <= 8.0
    assert result.speedup is not None
    assert drafter.training
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.cuda.get_rng_state())


def test_sampling_on_a_gpu_repeats_with_its_generator() -> None:
    target, drafter = shipped(torch.bfloat16)
    prompt = target.tokenizer(TEXTS[0])["input_ids"]
    limits = DecodeLimits(max_new_tokens=24, temperature=1.0)
    texts = [
        speculative_decode(
            target,
            drafter.eval(),
            prompt,
            limits=limits,
            generator=torch.Generator("cuda:0").manual_seed(seed),
        ).tokens
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]
