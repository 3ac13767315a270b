"""The very steps that a GPU captures, called instead of replayed: the same text as eagerly."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

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
from tiny_models import BLOCK, CONFIGS, SIZES, VOCAB, tiny_drafter, tiny_target

from dflash.decode import (
    Decoded,
    DecodeLimits,
    Replays,
    plain_decode,
    speculative_decode,
    static_bytes,
)
from dflash.decode.capture import NoHostReads
from dflash.decode.replays import num_rows
from dflash.decode.rows import NotStaticError, StaticRows
from dflash.drafter.model import Drafter
from dflash.target.model import Target

Body = Callable[[], None]
LIMITS = DecodeLimits(max_new_tokens=30)


def called(target: Target, **options: Any) -> Replays:  # noqa: ANN401
    """The steps as they are captured, but called: what a graph would replay, run by Python."""
    return Replays(target, launch=lambda body: body, **options)


def spoil(replays: Replays) -> None:
    """Fill every row with NaN, as if an earlier prompt had left something."""
    for buffers in replays._buffers.values():  # noqa: SLF001
        context = buffers._context  # noqa: SLF001
        extra = [] if context is None else [context._keys, context._values]  # noqa: SLF001
        for tensor in (*buffers.rows.keys, *buffers.rows.values, *extra):
            tensor.fill_(torch.nan)


def facts(decoded: Decoded) -> tuple[list[int], list[int], str]:
    return decoded.tokens, decoded.accepted, decoded.finished_by


@pytest.mark.parametrize("name", CONFIGS)
def test_several_prompts_on_the_same_rows_give_the_targets_own_text(name: str) -> None:
    target = tiny_target(CONFIGS[name]())
    replays = called(target)
    lengths = set()
    for prompt, wrong_every in zip(PROMPTS * 2, (2, 3, 5, 11, 7, 4), strict=True):
        text = own_text(target, prompt, 36)
        forecaster = Forecaster(tiny_drafter().shape).knows(target, prompt + text, wrong_every)
        spoil(replays)
        decoded = speculative_decode(target, forecaster, prompt, limits=LIMITS, replays=replays)
        assert decoded.tokens == text[:30]
        assert (decoded.decode_loop, decoded.eager_because) == ("captured", None)
        lengths.update(decoded.accepted)
        spoil(replays)
        assert plain_decode(target, prompt, limits=LIMITS, replays=replays).tokens == text[:30]
    assert len(lengths) >= 4, "accepts of several lengths were exercised"
    assert len(replays._buffers) == 1, "one set of rows served every prompt"  # noqa: SLF001


@pytest.mark.parametrize("name", ["llama", "gemma3, window 5"])
def test_rows_grow_with_the_prompt_and_shorter_prompts_go_back_to_theirs(name: str) -> None:
    target = tiny_target(CONFIGS[name]())
    drafter = tiny_drafter()
    replays = called(target)
    long = [(7 * i) % VOCAB for i in range(100)]
    for prompt in (PROMPTS[1], long, PROMPTS[2], [*long, 3, 4], PROMPTS[0]):
        spoil(replays)
        decoded = speculative_decode(target, drafter, prompt, limits=LIMITS, replays=replays)
        assert decoded.tokens == own_text(target, prompt, 30)
        assert facts(decoded) == facts(speculative_decode(target, drafter, prompt, limits=LIMITS))
    assert sorted(replays._buffers) == [128, 256]  # noqa: SLF001


def test_rows_come_in_powers_of_two() -> None:
    assert [num_rows(n) for n in (1, 128, 129, 256, 300, 5000)] == [128, 128, 256, 256, 512, 8192]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 6, 7, 12, 19])
def test_an_answer_ends_as_it_does_eagerly(max_new_tokens: int) -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    text = own_text(target, PROMPTS[2], 60)
    stop = next(token for token in text[4:] if token not in text[:4])
    replays = called(target)
    for stop_ids, wrong_every in product(((), (stop,)), (3, 10**9)):
        limits = DecodeLimits(max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        blocks: list[list[tuple[list[int], int]]] = [[], []]
        ends = []
        for seen, way in zip(blocks, (replays, None), strict=True):
            forecaster = Forecaster(tiny_drafter().shape)
            forecaster.knows(target, PROMPTS[2] + text, wrong_every)
            if way is not None:  # the comparison at capture drafts too: let it not count
                speculative_decode(target, forecaster, PROMPTS[2], limits=limits, replays=way)
                forecaster.drafted = 0
            decoded = speculative_decode(
                target,
                forecaster,
                PROMPTS[2],
                limits=limits,
                replays=way,
                on_block=lambda tokens, accepted, seen=seen: seen.append((tokens, accepted)),
            )
            ends.append(facts(decoded))
        assert ends[0] == ends[1]
        assert blocks[0] == blocks[1]


def test_the_drafter_sees_the_same_context_as_eagerly() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    seen = []
    for replays in (called(target), None):
        drafter = Watched(tiny_drafter().shape).eval()
        drafter.load_state_dict(tiny_drafter().state_dict())
        limits = DecodeLimits(max_new_tokens=20)
        for prompt in PROMPTS:
            if replays is not None:
                spoil(replays)
            speculative_decode(target, drafter, prompt, limits=limits, replays=replays)
        seen.append(drafter.seen)
    static, eager = seen
    assert static.pop(0)[0] == static[0][0], "the comparison at capture drafts once more"
    assert [positions for positions, _ in static] == [positions for positions, _ in eager]
    for (_, one_BD), (_, other_BD) in zip(static, eager, strict=True):
        torch.testing.assert_close(one_BD, other_BD, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_sampled_text_is_the_eager_loops_for_the_same_generator(name: str) -> None:
    target = tiny_target(CONFIGS[name]())
    drafter = tiny_drafter()
    replays = called(target)
    before = torch.get_rng_state()
    for prompt, temperature in product(PROMPTS, (0.5, 1.3)):
        limits = DecodeLimits(max_new_tokens=12, temperature=temperature)
        texts = []
        for way in (replays, None):
            generator = torch.Generator().manual_seed(len(prompt))
            decoded = speculative_decode(
                target, drafter, prompt, limits=limits, generator=generator, replays=way
            )
            plain = plain_decode(target, prompt, limits=limits, generator=generator, replays=way)
            texts.append((facts(decoded), facts(plain)))
        assert texts[0] == texts[1]
    assert replays.decode_loop == "captured"
    assert torch.equal(before, torch.get_rng_state())


def test_sampled_text_is_distributed_as_the_targets_own() -> None:
    made: list[Replays] = []

    def decode(target: Target, *arguments: Any, **options: Any) -> Decoded:  # noqa: ANN401
        if not made:
            made.append(called(target))
        return speculative_decode(target, *arguments, replays=made[0], **options)

    assert distance_from_the_target(decode, seed=11) < AS_THE_TARGET
    assert made[0].decode_loop == "captured"


def guarded(body: Body) -> Body:
    def run() -> None:
        with NoHostReads():
            body()

    return run


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_reads_nothing_on_the_host(name: str) -> None:
    if name == "qwen3-moe" and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 loops over the experts on the host: the next test")
    target = tiny_target(CONFIGS[name]())
    for temperature in (0.0, 1.0):
        limits = DecodeLimits(max_new_tokens=5, temperature=temperature)
        replays = Replays(target, launch=guarded)
        for decoded in (
            speculative_decode(target, tiny_drafter(), [1, 2], limits=limits, replays=replays),
            plain_decode(target, [1, 2], limits=limits, replays=replays),
        ):
            assert decoded.eager_because is None


def test_a_target_that_reads_the_device_on_the_host_is_decoded_eagerly() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    layer = target.model.get_decoder().layers[1].mlp
    forward = layer.forward

    def peeking(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = forward(hidden)
        return out if float(out.abs().max()) >= 0.0 else -out

    layer.forward = peeking
    replays = Replays(target, launch=guarded)
    with pytest.warns(RuntimeWarning, match="reads the device on the host"):
        decoded = plain_decode(target, [1, 2], limits=LIMITS, replays=replays)
    assert decoded.decode_loop == "eager"
    assert decoded.tokens == own_text(target, [1, 2], 30)


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
    ],
)
def test_reading_the_device_on_the_host_is_refused(reads: Callable[[torch.Tensor], Any]) -> None:
    with NoHostReads(), pytest.raises(NotStaticError, match="on the host"):
        reads(torch.tensor([-1.0, 2.0]))


def test_another_drafter_gets_a_context_of_its_own() -> None:
    target = tiny_target(CONFIGS["llama"]())
    replays = called(target)
    drafters = [tiny_drafter(seed) for seed in (0, 1)]
    limits = DecodeLimits(max_new_tokens=24)
    for drafter in (drafters[0], drafters[1], drafters[0]):
        decoded = speculative_decode(target, drafter, PROMPTS[1], limits=limits, replays=replays)
        assert facts(decoded) == facts(
            speculative_decode(target, drafter, PROMPTS[1], limits=limits)
        )


def test_weights_that_training_moved_in_place_are_the_ones_that_draft() -> None:
    target = tiny_target(CONFIGS["llama"]())
    drafter = Watched(tiny_drafter().shape).eval()
    drafter.load_state_dict(tiny_drafter(0).state_dict())
    replays = called(target)
    limits = DecodeLimits(max_new_tokens=4)
    speculative_decode(target, drafter, PROMPTS[1], limits=limits, replays=replays)
    drafter.load_state_dict(tiny_drafter(1).state_dict())
    drafter.seen.clear()
    speculative_decode(target, drafter, PROMPTS[1], limits=limits, replays=replays)
    fresh = Watched(tiny_drafter().shape).eval()
    fresh.load_state_dict(tiny_drafter(1).state_dict())
    speculative_decode(target, fresh, PROMPTS[1], limits=limits)
    torch.testing.assert_close(drafter.seen[0][1], fresh.seen[0][1], rtol=1e-4, atol=1e-5)


def test_only_so_many_bytes_are_kept_and_they_are_counted() -> None:
    target = tiny_target(CONFIGS["llama"]())
    drafter = tiny_drafter()
    replays = called(target, kept_bytes=0)
    for length in (5, 120, 5):
        prompt = [(3 * i) % VOCAB for i in range(length)]
        speculative_decode(target, drafter, prompt, limits=LIMITS, replays=replays)
        plan = static_bytes(
            target.model.config, drafter.shape, num_tokens=length + 30 + BLOCK, item_bytes=4
        )
        assert replays.num_bytes == plan
    assert sorted(replays._buffers) == [128]  # noqa: SLF001
    both = called(target)
    for prompt in ([1], [2] * 120):
        speculative_decode(target, drafter, prompt, limits=LIMITS, replays=both)
    assert sorted(both._buffers) == [128, 256]  # noqa: SLF001
    assert both.num_bytes == 3 * plan


@pytest.fixture
def blind() -> Iterator[pytest.MonkeyPatch]:
    """Static rows whose windows are ignored: a fault that no exception shows."""
    with pytest.MonkeyPatch.context() as patch:
        allowed = StaticRows.allowed
        patch.setattr(StaticRows, "allowed", lambda self, _window: allowed(self, None))
        yield patch


def fails(body: Body) -> Body:
    del body
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")


@pytest.mark.usefixtures("blind")
def test_steps_that_see_something_else_are_found_out_and_decoding_goes_on_eagerly() -> None:
    target = tiny_target(CONFIGS["mistral, window 5"]())
    replays = called(target)
    with pytest.warns(RuntimeWarning, match="decoding runs eagerly"):
        first = speculative_decode(
            target, tiny_drafter(), PROMPTS[1], limits=LIMITS, replays=replays
        )
    second = plain_decode(target, PROMPTS[2], limits=LIMITS, replays=replays)
    assert first.tokens == own_text(target, PROMPTS[1], 30)
    assert second.tokens == own_text(target, PROMPTS[2], 30)
    for decoded in (first, second):
        assert decoded.decode_loop == "eager"
        assert decoded.eager_because is not None
        assert "logits are off" in decoded.eager_because


@pytest.mark.parametrize("drafter", [None, tiny_drafter()], ids=["plain", "speculative"])
def test_a_capture_that_fails_is_recorded_and_the_text_is_the_targets_own(
    drafter: Drafter | None,
) -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    replays = Replays(target, launch=fails)
    with pytest.warns(RuntimeWarning, match="not permitted when stream is capturing$"):
        decoded = (
            plain_decode(target, PROMPTS[1], limits=LIMITS, replays=replays)
            if drafter is None
            else speculative_decode(target, drafter, PROMPTS[1], limits=LIMITS, replays=replays)
        )
    assert decoded.tokens == own_text(target, PROMPTS[1], 30)
    assert decoded.decode_loop == replays.decode_loop == "eager"


def test_a_target_that_is_no_plain_attention_is_decoded_eagerly_and_says_so() -> None:
    target = tiny_target(transformers.Qwen3Config(**SIZES))
    target.model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0}
    replays = called(target)
    with pytest.warns(RuntimeWarning, match="dynamic RoPE"):
        decoded = plain_decode(target, PROMPTS[1], limits=LIMITS, replays=replays)
    assert decoded.tokens == own_text(target, PROMPTS[1], 30)


def test_on_a_cpu_the_loop_is_eager_and_the_result_says_why() -> None:
    target = tiny_target(CONFIGS["llama"]())
    decoded = plain_decode(target, [1], limits=DecodeLimits(max_new_tokens=2))
    assert decoded.decode_loop == "eager"
    assert decoded.eager_because == "graphs are captured on CUDA devices only, not on cpu"
