"""An evaluation reports the published tau, and touches nothing that is being trained."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tiny_models import BLOCK, CONFIGS, tiny_drafter, tiny_target

from dflash.decode import Decoded, Replays
from dflash.errors import DataError
from dflash.train.boundary import Judge
from dflash.train.evaluation import EvalSettings, Rig, decoding_copy, evaluate, summarise

if TYPE_CHECKING:
    from dflash.target.model import Target
    from dflash.train.step import TrainStep

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [40, 3, 3, 12, 60, 7]]
SETTINGS = EvalSettings(max_new_tokens=12)


def decoded(accepted: list[int], *, num_tokens: int, seconds: float) -> Decoded:
    return Decoded(
        tokens=[0] * num_tokens,
        accepted=accepted,
        prefill_s=1.0,
        decode_s=seconds,
        finished_by="length",
    )


def test_tau_is_the_mean_over_prompts_of_the_mean_over_steps() -> None:
    drafted = [
        decoded([4, 4, 1], num_tokens=10, seconds=1.0),
        decoded([1], num_tokens=2, seconds=1.0),
        decoded([], num_tokens=1, seconds=0.5),
    ]
    plain = [decoded([1] * 9, num_tokens=10, seconds=3.0)]
    result = summarise(drafted, plain, block_size=4)
    assert result.tau == pytest.approx((3.0 + 1.0) / 2)
    assert result.tau_per_prompt == [3.0, 1.0, None]
    assert result.steps_by_accepted_tokens == [2, 0, 0, 2]
    assert result.accepted_per_position == [0.5, 0.5, 0.5]
    assert result.num_verify_steps == 4
    assert result.num_new_tokens == 13
    assert result.tokens_per_s_drafter == pytest.approx((9 + 1 + 0) / 2.5)
    assert result.tokens_per_s_plain == pytest.approx(3.0)
    assert result.speedup == pytest.approx(9.0 / 3.0), "only the prompt that ran both ways"


def test_the_histogram_and_the_shares_describe_the_same_steps() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    result = evaluate(target, tiny_drafter(), PROMPTS, settings=SETTINGS)
    steps = result.steps_by_accepted_tokens
    assert len(steps) == BLOCK
    assert sum(steps) == result.num_verify_steps
    committed = sum((j + 1) * count for j, count in enumerate(steps))
    assert 1 + sum(result.accepted_per_position) == pytest.approx(committed / sum(steps))
    assert result.tokens_per_s_plain is None
    assert result.speedup is None


def test_the_first_prompts_also_run_without_the_drafter() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    settings = EvalSettings(max_new_tokens=12, num_plain_prompts=2)
    result = evaluate(target, tiny_drafter(), PROMPTS, settings=settings)
    assert result.tokens_per_s_plain is not None
    assert result.speedup is not None
    assert result.speedup > 0
    record = result.record(step=40, settings=settings)
    assert (record.tau, record.step, record.max_new_tokens) == (result.tau, 40, 12)


def test_the_watchdog_hears_every_step_and_the_screen_every_prompt() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    beats: list[int] = []
    seen: list[int] = []
    result = evaluate(
        target,
        tiny_drafter(),
        PROMPTS,
        settings=SETTINGS,
        heartbeat=lambda: beats.append(1),
        on_prompt=lambda number, *_: seen.append(number),
    )
    assert len(beats) == result.num_verify_steps + len(PROMPTS), "one more for every prefill"
    assert seen == [0, 1, 2]


def test_sampling_depends_on_the_seed_and_the_number_of_the_prompt_only() -> None:
    target = tiny_target(CONFIGS["llama"]())
    texts: dict[int, list[list[int]]] = {}
    for seed in (0, 0, 5):
        settings = EvalSettings(max_new_tokens=8, temperature=1.0, seed=seed)
        now: list[list[int]] = []
        evaluate(
            target,
            tiny_drafter(),
            PROMPTS,
            settings=settings,
            on_prompt=lambda _, one, _plain, now=now: now.append(one.tokens),
        )
        assert texts.setdefault(seed, now) == now
    assert texts[0] != texts[5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_goes_on_as_if_nothing_had_been_evaluated(dtype: torch.dtype) -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    target.model.to(dtype)
    target.dtype = dtype
    drafter = tiny_drafter().train()
    drafter.layers[1].eval()  # a mode of its own, which must come back too
    before = {name: (w.clone(), w.dtype) for name, w in drafter.state_dict().items()}
    random_state = torch.get_rng_state()
    evaluate(target, drafter, PROMPTS, settings=EvalSettings(max_new_tokens=4, temperature=1.0))
    assert torch.equal(random_state, torch.get_rng_state())
    assert drafter.training
    assert not drafter.layers[1].training
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, before[name][0])
        assert weight.dtype == before[name][1]


def test_a_drafter_is_copied_only_where_its_dtype_is_not_the_targets() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    drafter = tiny_drafter()
    with decoding_copy(drafter, target) as same:
        assert same is drafter
    target.dtype = torch.float16
    with decoding_copy(drafter, target) as copy:
        assert copy is not drafter
        assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}, "fp16 would overflow"


def test_prompts_that_measure_nothing_are_refused() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    with pytest.raises(DataError, match="there are no prompts"):
        evaluate(target, tiny_drafter(), [], settings=SETTINGS)
    with pytest.raises(DataError, match="none of the 3 prompts has a verify step"):
        evaluate(target, tiny_drafter(), PROMPTS, settings=EvalSettings(max_new_tokens=1))


def test_figures_are_finite() -> None:
    target = tiny_target(CONFIGS["llama"]())
    result = evaluate(target, tiny_drafter(), PROMPTS, settings=SETTINGS)
    assert 1.0 <= result.tau <= BLOCK
    assert math.isfinite(result.tokens_per_s_drafter)
    assert result.tokens_per_s_drafter > 0


def test_the_record_says_which_loop_decoded_and_why() -> None:
    target = tiny_target(CONFIGS["llama"]())
    eager = evaluate(target, tiny_drafter(), PROMPTS, settings=SETTINGS)
    record = eager.record(step=1, settings=SETTINGS)
    assert record.decode_loop == "eager"
    assert record.eager_because == "graphs are captured on CUDA devices only, not on cpu"
    captured = evaluate(target, tiny_drafter(), PROMPTS, settings=SETTINGS, rig=static_rig(target))
    record = captured.record(step=1, settings=SETTINGS)
    assert (record.decode_loop, record.eager_because) == ("captured", None)
    assert captured.tau_per_prompt == eager.tau_per_prompt


def test_one_eager_prompt_makes_the_evaluation_eager() -> None:
    one = decoded([2], num_tokens=3, seconds=1.0)
    captured = replace(one, decode_loop="captured")
    fell_back = replace(one, eager_because="out of memory")
    result = summarise([captured, captured], [fell_back], block_size=4)
    assert (result.decode_loop, result.eager_because) == ("eager", "out of memory")


def test_a_copy_that_captured_steps_read_stays_and_gets_the_new_weights() -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    drafter = tiny_drafter().to(torch.bfloat16)
    rig = static_rig(target)
    before = evaluate(target, drafter, PROMPTS, settings=SETTINGS, rig=rig)
    held = rig.num_bytes
    with rig.drafter(drafter) as copy:
        assert copy is not drafter
    drafter.load_state_dict(tiny_drafter(3).state_dict())
    after = evaluate(target, drafter, PROMPTS, settings=SETTINGS, rig=rig)
    with rig.drafter(drafter) as same:
        assert same is copy
        assert torch.equal(same.fc.weight, drafter.fc.weight.float())
    assert (
        after.tau_per_prompt == evaluate(target, drafter, PROMPTS, settings=SETTINGS).tau_per_prompt
    )
    assert before.num_prompts == after.num_prompts
    assert rig.num_bytes == held > sum(weight.nbytes for weight in copy.parameters())


def static_rig(target: "Target") -> Rig:
    """A rig whose steps are those of a GPU, called instead of replayed."""
    rig = Rig(target)
    rig.replays = Replays(target, launch=lambda body: body)
    return rig


def test_evaluations_of_a_run_share_their_rig() -> None:
    target, drafter = tiny_target(CONFIGS["llama"]()), tiny_drafter()
    step = cast("TrainStep", SimpleNamespace(loss=SimpleNamespace(drafter=drafter)))
    judge = Judge(target, step, drafter.shape, PROMPTS, SETTINGS)
    launches = []
    judge.rig.replays = Replays(target, launch=lambda body: launches.append(body) or body)
    records = [judge.measure(number, lambda: None) for number in (1, 2)]
    assert len(launches) == 1, "the second evaluation made nothing ready"
    assert [record and record.decode_loop for record in records] == ["captured"] * 2
