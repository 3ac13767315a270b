"""The decode case: the target's own answers, tau as it is evaluated, and stored drafters."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import TINY, measured, measured_apart, setting
from tiny_runs import run, tiny_config, write_texts

from dflash.config.sections import DataConfig
from dflash.train.evaluation import EvalSettings, evaluate
from dflash.train.pair import heldout_of, load_pair
from dflash_bench.cases import all_cases
from dflash_bench.cases.decode import Decoding, planned_gib, random_prompts


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
