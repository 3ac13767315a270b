"""The decode case: the target's own answers, tau as it is evaluated, and stored drafters."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import TINY, measured, measured_apart, setting
from tiny_runs import run, tiny_config, write_texts

from dflash.config.sections import DataConfig
from dflash.decode import Decoded
from dflash.errors import DataError
from dflash.execution import capture_watch
from dflash.train.evaluation import EvalSettings, evaluate
from dflash.train.pair import heldout_of, load_pair
from dflash_bench.cases import all_cases
from dflash_bench.cases.decode import Decoding, planned_gib, random_prompts
from dflash_bench.child import Child
from dflash_bench.rows import Beside, row_of


@pytest.fixture(scope="module")
def random_weights() -> dict[str, tuple[list[float], dict[str, Any]]]:
    return {mode: measured("decode", setting(mode)) for mode in ("plain", "eager")}


@pytest.fixture(scope="module")
def run_dir(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decode")
    write_texts(folder / "heldout", num_files=4)
    config = tiny_config(
        place, data={"heldout": (str(folder / "heldout"),)}, eval={"num_prompts": 3}
    )
    assert isinstance(config.data, DataConfig)
    run(config, folder / "run")
    return folder / "run"


def test_drafting_changes_no_answer(random_weights: dict[str, Any]) -> None:
    plain, eager = (random_weights[mode][1]["more"]["details"] for mode in ("plain", "eager"))
    assert plain["answer_sha256"] == eager["answer_sha256"]
    assert plain["num_prompts"] == eager["num_prompts"] == 4
    assert eager["max_new_tokens"] == 16


def test_one_token_a_step_is_a_tau_of_one(random_weights: dict[str, Any]) -> None:
    more = random_weights["plain"][1]["more"]
    assert more["tau"] == 1.0
    assert more["details"]["num_verify_steps"] == 4 * (16 - 1)
    assert set(more["details"]["accepted_per_position"]) == {0.0}


def test_a_timed_step_is_a_token_and_random_weights_are_told(
    random_weights: dict[str, Any],
) -> None:
    times_ms, facts = random_weights["eager"]
    assert len(times_ms) == 4
    assert facts["units"] == 1.0
    assert facts["more"]["weights"] == "random"
    assert facts["more"]["loop"] == "eager"
    assert "asked for" in facts["more"]["details"]["eager_because"]
    assert "first_steps_ms" not in facts


def test_tokens_take_less_than_the_turn_that_decodes_them_and_most_of_it() -> None:
    subject = Decoding(setting("eager"))
    subject.build()
    subject.prepare()
    started = time.perf_counter()
    times_ms = subject.turn()
    turn_ms = (time.perf_counter() - started) * 1e3
    assert 0.3 * turn_ms < sum(times_ms) * (16 - 1) < turn_ms  # the prefill gives the first of 16


def test_a_runs_drafter_decodes_its_held_out_prompts_with_the_tau_of_eval(run_dir: Path) -> None:
    pair = load_pair(run_dir, device="cpu")
    prompts = heldout_of(pair)
    wanted = evaluate(
        pair.target,
        pair.drafter,
        prompts,
        settings=EvalSettings(max_new_tokens=16, stop_ids=pair.target.stop_ids),
    )
    asked = setting("eager", drafter=str(run_dir), turn_steps=1)
    assert len(prompts) == 3
    _, facts = measured("decode", asked, num_turns=3)
    assert facts["more"]["tau"] == pytest.approx(wanted.tau)
    assert facts["more"]["weights"].endswith("step-00000040")
    steps = facts["more"]["details"]["steps_by_accepted_tokens"]
    assert steps == wanted.steps_by_accepted_tokens
    assert planned_gib(asked) is None


def answer(num_tokens: int, *, ms_a_token: float = 1.0, loop: Any = "eager") -> Decoded:  # noqa: ANN401
    return Decoded(
        tokens=[1] * num_tokens,
        accepted=[1] * num_tokens,
        prefill_s=0.1,
        decode_s=(num_tokens - 1) * ms_a_token * 1e-3,
        finished_by="stop",
        decode_loop=loop,
        eager_because=None if loop == "captured" else "the device is out of memory",
    )


def answering(mode: str, answers: list[Decoded], monkeypatch: pytest.MonkeyPatch) -> Decoding:
    """Built; then it gives *answers* one after another."""
    subject = Decoding(setting(mode))
    subject.build()
    subject.models.prompts = [[1]] * len(answers)
    monkeypatch.setattr(subject, "_decode", lambda number: answers[number % len(answers)])
    return subject


def test_a_rate_is_tokens_over_time_however_long_answers_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long, short = answer(64, ms_a_token=10.0), answer(3, ms_a_token=40.0)
    subject = answering("plain", [long, short], monkeypatch)
    child = Child("plain", Decoding, limit_s=1.0)  # type: ignore[arg-type]
    child.turns = [subject.turn()]
    child.facts |= subject.so_far()
    child.close()
    assert child.turns == [[pytest.approx(10.0), pytest.approx(40.0)]]
    row = row_of(all_cases()["decode"], setting("plain"), child, beside=Beside())
    assert row.per_s is not None
    assert row.per_s.value == pytest.approx((63 + 2) / (0.63 + 0.08))


def test_an_answer_of_its_first_token_alone_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = answering("plain", [answer(1), answer(5), answer(1)], monkeypatch)
    assert [len(subject.turn()) for _ in range(3)] == [2, 2, 2]
    assert subject.so_far()["averaged"] == [4.0] * 6
    none = answering("plain", [answer(1)] * 3, monkeypatch)
    with pytest.raises(DataError, match="all 3 prompts with their first token"):
        none.turn()


def test_later_captures_spoil_nothing_and_giving_up_does(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = answer(5, loop="captured")
    subject = answering("captured", [captured, captured, captured, answer(5)], monkeypatch)
    subject._counters.begin()  # noqa: SLF001 - as its first step does
    subject.turn()
    capture_watch().begun["a thread"] += 3  # a longer prompt
    assert subject.so_far()["unsettled"] == ""
    subject.turn()
    capture_watch().begun.pop("a thread")
    told = "it was captured no more: the device is out of memory"
    assert subject.so_far()["unsettled"] == told


def test_prompts_may_come_from_a_file(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("line 1 of file 2: 5\n")
    _, facts = measured(
        "decode", setting("plain", drafter=str(run_dir), data=(str(file),)), num_turns=1
    )
    assert facts["more"]["details"]["num_prompts"] == 2


def test_prompts_have_one_length_or_many() -> None:
    fixed = random_prompts(setting("plain"))
    varying = random_prompts(setting("plain", lengths="variable"))
    assert {len(prompt) for prompt in fixed} == {128}
    assert len({len(prompt) for prompt in varying}) > 8
    assert all(16 <= len(prompt) <= 384 for prompt in varying)
    assert all(0 <= token < TINY.drafter.vocab_size for prompt in varying for token in prompt)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", all_cases()["decode"].modes)
def test_decoding_is_measured_on_a_gpu_and_captured_where_it_says_so(mode: str) -> None:
    child = measured_apart("decode", setting(mode, target_device="cuda:0", devices=("cuda:0",)))
    assert child.failure is None
    more = child.facts["more"]
    assert more["loop"] == ("eager" if mode == "eager" else "captured")
    assert child.facts["memory"].peak_allocated_gib > 0
    assert (child.facts["graphs"].captured > 0) == (mode != "eager")
