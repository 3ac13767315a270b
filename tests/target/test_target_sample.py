"""Batched generation chooses what the model alone would choose, row by row."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from target_models import CONFIGS, write_model

from dflash.errors import UsageError
from dflash.target.model import Target
from dflash.target.sample import SampleBatches, SampleLimits, Sampler, _choose, sample_batch

PROMPTS = [[5, 9, 11, 30, 7, 8, 41], [44], [12, 13, 14]]
NEW = 12


def load(folder: Path, name: str, *, device: str = "cpu") -> Target:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return Target.load(write_model(folder / name, name), taps=[0], device=device, dtype=dtype)


def greedy_alone(target: Target, prompt: list[int], stops: tuple[int, ...] = ()) -> list[int]:
    """Extend one prompt token by token with the whole model and no cache."""
    ids = list(prompt)
    for _ in range(NEW):
        with torch.no_grad():
            logits = target.model(torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_rows_equal_each_prompt_alone(tmp_path: Path, name: str) -> None:
    target = load(tmp_path, name)
    rows = sample_batch(
        target, PROMPTS, max_new_tokens=NEW, temperature=0.0, top_p=1.0, seed=0, stop_ids=()
    )
    assert rows == [greedy_alone(target, prompt) for prompt in PROMPTS]


def test_a_row_ends_with_its_first_stop_id(tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    free = [greedy_alone(target, prompt) for prompt in PROMPTS]
    stops = (free[0][3], free[2][0])
    sampler = Sampler(target, SampleLimits(max_new_tokens=NEW, temperature=0.0, stop_ids=stops))
    rows = sampler.sample(PROMPTS, seed=0)
    assert rows == [greedy_alone(target, prompt, stops) for prompt in PROMPTS]
    assert rows[2] == [stops[1]]


def test_generation_ends_early_when_every_row_has_ended(tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    forwards: list[int] = []
    limits = SampleLimits(max_new_tokens=100, temperature=0.0, stop_ids=tuple(range(64)))
    sampler = Sampler(target, limits)
    sampler._model.register_forward_hook(lambda *_: forwards.append(1))  # noqa: SLF001
    assert [len(row) for row in sampler.sample(PROMPTS, seed=0)] == [1, 1, 1]
    assert len(forwards) < 20


def test_the_seed_decides_the_text_whatever_came_before(tmp_path: Path) -> None:
    target = load(tmp_path, "qwen3")
    limits = SampleLimits(max_new_tokens=NEW, temperature=1.0, top_p=0.9)
    sampler = Sampler(target, limits)
    first = sampler.sample(PROMPTS, seed=1)
    other = sampler.sample([PROMPTS[0]], seed=2)
    assert (
        sampler.sample(PROMPTS, seed=1) == first == Sampler(target, limits).sample(PROMPTS, seed=1)
    )
    assert sampler.sample(PROMPTS, seed=3) != first
    assert len(other) == 1


def test_requests_of_two_kinds_keep_their_own_buffers(tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    batches = SampleBatches(target)
    rest = {"temperature": 0.0, "top_p": 1.0, "seed": 0, "stop_ids": (2,)}
    short, long, again = (batches(PROMPTS, max_new_tokens=n, **rest) for n in (3, NEW, 3))
    assert short == again == [row[:3] for row in long]


def test_more_rows_than_a_round_number_are_filled_up_and_cut(tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    limits = SampleLimits(max_new_tokens=2, temperature=0.0)
    rows = Sampler(target, limits).sample([PROMPTS[i % 3] for i in range(66)], seed=0)
    assert rows == [greedy_alone(target, PROMPTS[i % 3])[:2] for i in range(66)]


def test_draws_follow_the_temperature_and_stay_in_the_nucleus() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.05, 0.5, 0.3, 0.15])
    logits = (shares.log() * 2.0).repeat(20000, 1)  # a temperature of 2 gives the shares back
    limits = SampleLimits(max_new_tokens=1, temperature=2.0)
    found = torch.bincount(_choose(logits, limits, generator), minlength=4) / 20000
    torch.testing.assert_close(found, shares, rtol=0, atol=0.015)
    # 0.5 alone is below 0.6, 0.5 + 0.3 is the smallest set that holds it
    limits = SampleLimits(max_new_tokens=1, temperature=2.0, top_p=0.6)
    found = torch.bincount(_choose(logits, limits, generator), minlength=4) / 20000
    expected = torch.tensor([0.0, 0.5, 0.3, 0.0]) / 0.8
    torch.testing.assert_close(found, expected, rtol=0, atol=0.015)
    assert found[0] == found[3] == 0.0


def test_bad_requests_are_named(tmp_path: Path) -> None:
    target = load(tmp_path, "llama")
    sampler = Sampler(target, SampleLimits(max_new_tokens=1))
    assert sampler.sample([], seed=0) == []
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        sampler.sample([[4], []], seed=0)
    with pytest.raises(UsageError, match="token 64 is outside"):
        sampler.sample([[4, 64]], seed=0)
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}):
        with pytest.raises(UsageError):
            SampleLimits(**{"max_new_tokens": 1, **wrong})


def test_a_step_is_captured_on_the_device_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graph, stream and a generator's seed for the graph are made on the current device."""
    current, seen = ["the thread's own"], []

    @contextmanager
    def device(name: torch.device) -> Iterator[None]:
        current.append(str(name))
        yield
        current.pop()

    class Graph:
        def __init__(self) -> None:
            seen.append(("graph", current[-1]))

        def register_generator_state(self, _generator: torch.Generator) -> None:
            seen.append(("seed", current[-1]))

    @contextmanager
    def graph(_graph: Graph, *, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        seen.append(("capture", stream))
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda name: f"a stream of {name}")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    sampler = Sampler(load(tmp_path, "llama"), SampleLimits(max_new_tokens=2))
    sampler.sample(PROMPTS, seed=0)
    batch = sampler._batch  # noqa: SLF001
    assert batch is not None
    batch._capture()  # noqa: SLF001
    assert seen == [("graph", "cpu"), ("seed", "cpu"), ("capture", "a stream of cpu")]
    assert current == ["the thread's own"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
def test_a_captured_step_writes_what_the_uncaptured_one_writes(
    tmp_path: Path, name: str, device: str
) -> None:
    """Whichever device is the thread's own."""
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    target = load(tmp_path, name, device=device)
    for temperature in (0.0, 1.0):
        limits = SampleLimits(max_new_tokens=40, temperature=temperature, top_p=0.9)
        plain, graphed = (Sampler(target, limits, graph=graph) for graph in (False, True))
        for seed in (0, 1):
            rows = graphed.sample(PROMPTS, seed=seed)
            again = graphed.sample(PROMPTS, seed=seed)
            assert rows == again
            if temperature == 0.0:
                assert rows == plain.sample(PROMPTS, seed=seed)
        assert temperature == 0.0 or graphed.sample(PROMPTS, seed=2) != rows
