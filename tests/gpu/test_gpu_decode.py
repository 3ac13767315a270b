"""Decoding and evaluating on a GPU: the same text in fp32, and no trace left in bf16."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dflash.config import DrafterConfig
from dflash.decode import DecodeLimits, Replays, plain_decode, speculative_decode
from dflash.drafter.model import Drafter
from dflash.target.model import Target
from dflash.target.shape import default_shape
from dflash.train.evaluation import EvalSettings, Rig, evaluate

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
    for replays in (Replays(target), Replays(target, eager_because="asked for")):
        for decoded in (
            plain_decode(target, prompt, limits=limits, replays=replays),
            speculative_decode(target, drafter.eval(), prompt, limits=limits, replays=replays),
        ):
            assert decoded.tokens == own
            assert decoded.decode_loop == replays.decode_loop
        assert replays.eager_because in {None, "asked for"}


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


def test_captured_steps_serve_many_prompts_and_grow_with_them() -> None:
    target, drafter = shipped(torch.float32)
    eager, captured = Replays(target, eager_because="asked for"), Replays(target)
    held = []
    for text in [*TEXTS, TEXTS[0] * 40, *TEXTS, TEXTS[1] * 60, *TEXTS]:
        prompt = target.tokenizer(text)["input_ids"]
        limits = DecodeLimits(max_new_tokens=48)
        for decoded, expected in (
            (
                speculative_decode(target, drafter.eval(), prompt, limits=limits, replays=captured),
                speculative_decode(target, drafter.eval(), prompt, limits=limits, replays=eager),
            ),
            (
                plain_decode(target, prompt, limits=limits, replays=captured),
                plain_decode(target, prompt, limits=limits, replays=eager),
            ),
        ):
            assert decoded.eager_because is None
            assert decoded.tokens == expected.tokens
        held.append(captured.num_bytes)
    assert held[-1] == held[-len(TEXTS)], "known lengths cost nothing more"
    assert held[-1] > held[0]


def test_another_drafter_is_captured_anew_into_a_pool_that_lives() -> None:
    target, first = shipped(torch.float32)
    second = Drafter(first.shape)
    second.initialise(1)
    replays = Replays(target)
    limits = DecodeLimits(max_new_tokens=24)
    prompt = target.tokenizer(TEXTS[1])["input_ids"]
    for drafter in (first.eval(), second.to("cuda:0").eval(), first):
        decoded = speculative_decode(target, drafter, prompt, limits=limits, replays=replays)
        eager = speculative_decode(
            target,
            drafter,
            prompt,
            limits=limits,
            replays=Replays(target, eager_because="asked for"),
        )
        assert decoded.eager_because is None
        assert (decoded.tokens, decoded.accepted) == (eager.tokens, eager.accepted)


def test_captured_sampling_draws_what_the_eager_loop_draws() -> None:
    target, drafter = shipped(torch.float32)
    prompt = target.tokenizer(TEXTS[2])["input_ids"]
    limits = DecodeLimits(max_new_tokens=32, temperature=0.8)
    texts = []
    for replays in (Replays(target), Replays(target, eager_because="asked for")):
        generator = torch.Generator("cuda:0").manual_seed(5)
        decoded = speculative_decode(
            target, drafter.eval(), prompt, limits=limits, generator=generator, replays=replays
        )
        texts.append(decoded.tokens)
    assert texts[0] == texts[1]


def step_ms(target: Target, drafter: Drafter | None, replays: Replays) -> float:
    prompt = target.tokenizer(TEXTS[1])["input_ids"]
    limits = DecodeLimits(max_new_tokens=64)
    best = float("inf")
    for _ in range(3):
        decoded = (
            plain_decode(target, prompt, limits=limits, replays=replays)
            if drafter is None
            else speculative_decode(target, drafter, prompt, limits=limits, replays=replays)
        )
        best = min(best, 1000 * decoded.decode_s / len(decoded.accepted))
    return best


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "speculative"])
def test_a_captured_step_takes_a_fraction_of_an_eager_one(*, drafts: bool) -> None:
    target, drafter = shipped(torch.bfloat16)
    used = drafter.to(torch.bfloat16).eval() if drafts else None
    eager = step_ms(target, used, Replays(target, eager_because="asked for"))
    captured = step_ms(target, used, Replays(target))
    print(f"eager {eager:.2f} ms, captured {captured:.2f} ms a step")  # noqa: T201
    assert captured < 0.4 * eager


def test_an_evaluation_leaves_its_graphs_and_its_copy_for_the_next() -> None:
    target, drafter = shipped(torch.bfloat16)  # the drafter is fp32: a bf16 copy decodes
    prompts = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    settings = EvalSettings(max_new_tokens=32)
    rig = Rig(target)
    first = evaluate(target, drafter.train(), prompts, settings=settings, rig=rig)
    held, allocations = rig.num_bytes, torch.cuda.memory_stats()["num_device_alloc"]
    assert first.decode_loop == "captured", first.eager_because
    again = evaluate(target, drafter, prompts, settings=settings, rig=rig)
    assert again.tau_per_prompt == first.tau_per_prompt
    assert rig.num_bytes == held
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocations
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.mul_(-1.0)
    moved = evaluate(target, drafter, prompts, settings=settings, rig=rig)
    fresh = evaluate(target, drafter, prompts, settings=settings)
    assert moved.tau_per_prompt == fresh.tau_per_prompt, "the graphs read the new weights"


@contextmanager
def busy_neighbour() -> Iterator[list[str]]:
    """Another thread that multiplies on a stream of its own and allocates all the time."""
    stop, failed = threading.Event(), []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                held: list[torch.Tensor] = []
                while not stop.is_set():
                    rows = 6000 + 500 * (len(held) % 20)  # from 24 MB on: cudaMalloc, not a cache
                    held.append(torch.ones(rows, 1024, device="cuda"))
                    held[-1][:512] @ held[-1][:512].T
                    if len(held) == 60:
                        torch.cuda.current_stream().synchronize()
                        held.clear()
                    time.sleep(0)
        except Exception as error:  # noqa: BLE001 (told by the test)
            failed.append(repr(error))

    thread = threading.Thread(target=work, name="neighbour")
    thread.start()
    try:
        yield failed
    finally:
        stop.set()
        thread.join()


def test_a_thread_captures_and_decodes_while_another_multiplies_and_allocates() -> None:
    target, drafter = shipped(torch.float32)
    prompts = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    limits = DecodeLimits(max_new_tokens=48)
    eager = Replays(target, eager_because="asked for")
    expected = [
        speculative_decode(target, drafter.eval(), prompt, limits=limits, replays=eager).tokens
        for prompt in prompts
    ]
    seen: list[tuple[list[int], str | None]] = []

    def decode() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                replays = Replays(target)  # captures every time
                for prompt in prompts:
                    decoded = speculative_decode(
                        target, drafter, prompt, limits=limits, replays=replays
                    )
                    seen.append((decoded.tokens, decoded.eager_because))

    with busy_neighbour() as failed:
        thread = threading.Thread(target=decode, name="drafter")
        thread.start()
        thread.join()
    assert failed == []
    assert seen == [(tokens, None) for tokens in expected] * 3
