"""``dflash bench`` as a user meets it: what it plans, prints, writes, refuses and leaves with."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_samples import error, good, sample

from dflash.cli.__main__ import main
from dflash.measurement import Bench, Estimate
from dflash_bench import scaling
from dflash_bench.files import read_bench
from dflash_bench.session import BenchPlan

Capture = pytest.CaptureFixture[str]
Answer = Callable[[Bench], list[BenchPlan]]
CURVE = [row for row in sample().rows if row.shape != "made-up-3072"]
ROOT = Path(__file__).parents[2]
BOTH = f"--shape tiny --config {ROOT}/configs/quickstart.toml"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_rows_measured_is_exit_zero_with_a_table_on_stdout(
    answer: Answer, capsys: Capture
) -> None:
    answer(good())
    assert main(["bench"]) == 0
    said = capsys.readouterr()
    assert "graphed" in said.out
    assert said.err == "measuring\n"
    assert max(map(len, said.out.splitlines())) <= 78


def test_every_option_reaches_the_plan(answer: Answer) -> None:
    plans = answer(good())
    words = "bench drafter-step --mode eager --mode graphed --shape tiny --lengths variable"
    words += " --lengths fixed --drafters 2 --device cpu --matmul fp8 --seed 3 --steps 5 --pairs 7"
    words += " --precision 2% --max-time 9 --timeout 60 --set token_budget=128 --target-device cpu"
    words += " --drafter runs/x --data a.txt --data b.txt --profile"
    assert main(words.split()) == 0
    plan = plans[0]
    assert (plan.cases, plan.modes) == (("drafter-step",), ("eager", "graphed"))
    assert [shape.token_budget for shape in plan.shapes] == [128]
    assert (plan.lengths, plan.drafters, plan.devices) == (("fixed", "variable"), 2, ("cpu",))
    assert (plan.matmul, plan.seed, plan.turn_steps, plan.min_pairs) == ("fp8", 3, 5, 7)
    assert (plan.precision, plan.max_time_s, plan.limit_s) == (0.02, 9.0, 60.0)
    assert (plan.target_device, plan.drafter, plan.data) == ("cpu", "runs/x", ("a.txt", "b.txt"))
    assert plan.profile
    assert plan.command == f"dflash {words}"


def test_a_training_configuration_is_a_shape(answer: Answer) -> None:
    plans = answer(good())
    config = str(ROOT / "configs" / "quickstart.toml")
    assert main(["bench", "--config", config, "--set", "data.token_budget=512"]) == 0
    assert plans[0].shapes[0].token_budget == 512
    assert plans[0].shapes[0].drafter.hidden_size == 192


def test_a_report_never_takes_the_place_of_what_is_read(
    answer: Answer, tmp_path: Path, capsys: Capture
) -> None:
    plans = answer(good())
    mine = tmp_path / "mine.toml"
    text = (ROOT / "configs" / "quickstart.toml").read_text()
    mine.write_text(text)
    (tmp_path / "link.json").symlink_to(mine)
    for words in (f"--json {mine}", f"--markdown {tmp_path / 'link.json'}", f"--html {mine}"):
        assert main(["bench", "--config", str(mine), *words.split()]) == 2
        assert "would replace a file that this command reads" in error(capsys)
    assert mine.read_text() == text
    assert plans == []


def test_two_shapes_of_one_name_are_refused(
    answer: Answer, tmp_path: Path, capsys: Capture
) -> None:
    plans = answer(good())
    other = tmp_path / "quickstart.toml"
    text = (ROOT / "configs" / "quickstart.toml").read_text()
    other.write_text(text)
    configs = (str(ROOT / "configs" / "quickstart.toml"), str(other))
    assert main(["bench", "--config", configs[0], "--config", configs[1]]) == 2
    assert "two shapes are called quickstart" in error(capsys)
    assert plans == []


def test_an_assignment_is_for_the_shapes_that_have_its_key(answer: Answer) -> None:
    plans = answer(good())
    sets = ("token_budget=512", "data.token_budget=1024", "drafter.num_layers=1")
    words = [*BOTH.split(), *(word for item in sets for word in ("--set", item))]
    assert main(["bench", *words]) == 0
    tiny, mine = plans[0].shapes
    assert (tiny.token_budget, mine.token_budget) == (512, 1024)
    assert (tiny.drafter.num_layers, mine.drafter.num_layers) == (1, 1)  # both have this one
    assert tiny.name == "tiny:token_budget=512:drafter.num_layers=1"
    assert mine.name == "quickstart:data.token_budget=1024:drafter.num_layers=1"


def test_an_expectation_that_is_missed_is_exit_one(answer: Answer, capsys: Capture) -> None:
    answer(good())
    assert main(["bench", "--expect", "graphed/eager >= 3"]) == 1
    assert "!! graphed/eager >= 3 is missed" in capsys.readouterr().out


def test_an_expectation_without_a_verdict_is_exit_four(answer: Answer, capsys: Capture) -> None:
    wide = [
        each.model_copy(update={"ratio": Estimate(value=0.6, low=0.3, high=1.2)})
        for each in sample().comparisons
    ]
    answer(good(comparisons=wide))
    assert main(["bench", "--expect", "graphed/eager >= 1.5"]) == 4
    assert "?? graphed/eager >= 1.5 is unclear" in capsys.readouterr().out


def test_an_interrupted_bench_is_kept_and_leaves_with_130(answer: Answer, tmp_path: Path) -> None:
    answer(good(complete=False))
    assert main(["bench", "--json", "a.json"]) == 130
    assert read_bench(tmp_path / "a.json").complete is False


def test_a_bench_in_which_nothing_ran_is_exit_four(answer: Answer, capsys: Capture) -> None:
    rows = [row for row in sample().rows if row.state == "skipped"]
    answer(good(rows=rows, comparisons=[]))
    assert main(["bench"]) == 4
    assert "151.0 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told", "hint"),
    [
        ("drafterstep", "there is no case 'drafterstep'", "did you mean drafter-step?"),
        ("--mode graphd", "there is no mode 'graphd'", "did you mean graphed?"),
        ("--shape tinny", "there is no", "did you mean tiny?"),
        ("--shape tiny --set token_bugdet=4", "token_bugdet", "did you mean token_budget?"),
        ("--shape tiny --set num_documents=1000", "shape tiny:num_documents=1000: num_doc", ""),
        ("--shape tiny --set num_anchors=257", "multiples of 16", ""),
        ("--shape tiny --set drafter.rope_theta=nan", "drafter.rope_theta cannot be nan", ""),
        (f"{BOTH} --set data.token_bugdet=512", "neither a shape nor a", "data.token_budget?"),
        (f"{BOTH} --set token_budget", "--set token_budget is no override", "key=value"),
        (f"{BOTH} --set data.token_budget=-1", "data.token_budget", ""),
        ("--precision 0", "--precision 0 is no share above 0 and below 1", "--precision 1%"),
        ("--precision fine", "--precision fine is no share", "--precision 1%"),
        ("--lengths some", "--lengths some is neither fixed nor variable", ""),
        ("--expect graphed/eagr>=3", "at character 9: there is no mode 'eagr'", "eager?"),
        (
            "--mode eager --expect graphed/eager>=3",
            "at character 1: mode 'graphed' is",
            "--mode gr",
        ),
        ("--mode eager --expect eager/graphed>=3", "at character 7: mode 'graphed'", "--mode gr"),
        (
            "--mode eager --expect warmed.step_ms<9",
            "at character 1: mode 'warmed'",
            "--mode warmed",
        ),
        ("--mode eager --expect warmed>9", "at character 1: mode 'warmed'", "--mode warmed"),
        ("--mode eagr --expect eager/eager>=1", "there is no mode 'eagr'", "did you mean eager?"),
        (
            "mask decode --expect plain/launched>1",
            "at character 7: no case here has both",
            "plain,",
        ),
        ("--expect gibberish", "at character 1: there is no figure 'gibberish'", "figures:"),
        ("--json no/such/folder/a.json", "cannot be written", "a folder that exists"),
        ("--html .", "cannot be written", "a folder that exists"),
        ("--config missing.toml", "missing.toml", ""),
        ("--shape tiny --set num_anchors=512", "256 tokens have at most as many anchors", ""),
        (f"--seed {2**63}", "--seed", ""),
        ("--max-time inf", "--max-time", ""),
        ("--drafters 99999999999999999999", "--drafters", ""),
        ("--steps 10001", "--steps", ""),
        ("--shape tiny --set =3", "--set =3 is no override", "key=value"),
        ("--timeout inf", "--timeout", ""),
        ("--markdown -", "--markdown - names no file", "/dev/stdout"),
        ("--html -", "--html - names no file", "/dev/stdout"),
        ("--expect step_ms<1e400", "1e400 is no limit", ""),
        ("--expect step_ms<\u0663", "a number is missing", ""),
    ],
)
def test_a_mistake_is_exit_two_before_anything_is_measured(
    answer: Answer, capsys: Capture, *, words: str, told: str, hint: str
) -> None:
    plans = answer(good())
    assert main(["bench", *words.split()]) == 2
    said = error(capsys)
    assert told in said
    assert hint in said
    assert plans == []


def stored_drafter(folder: Path, **target: str) -> Path:
    shape = {"sizes": "are read by the process that decodes"}
    manifest = {"format_version": 1, "step": 1, "shape": shape, "target": target, "files": {}}
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("decode --drafter nope", "case decode: there is no checkpoint folder at nope"),
        ("packing decode --drafter .", "case decode: . is neither a run folder"),
        ("decode --drafter lost", "case decode: the target of lost = 'gone': there is no such"),
        ("decode --drafter whole", "case decode: whole lies in no run folder"),
        ("decode --drafter whole --data a.txt", "case decode: a.txt: cannot be read (there is no"),
        ("decode --drafter whole --data a.pdf", "case decode: a.pdf: prompts are read from"),
        ("decode --data nope", "--data is read by none of decode here"),
        ("drafter-step --drafter whole", "--drafter is read by none of drafter-step here"),
        ("pipeline --data nope", "case pipeline: nope: no such file or folder"),
        ("scaling pipeline --values 1,2 --data stdlib:x", "case pipeline: stdlib:x is not a split"),
    ],
)
def test_a_file_that_is_not_there_is_exit_two_before_a_process_is_started(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, *, words: str, told: str
) -> None:
    stored_drafter(tmp_path / "lost", source="gone", fingerprint="0")
    stored_drafter(tmp_path / "whole", source="stdlib-lm", fingerprint="0")

    def start(*_: object, **_more: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("dflash_bench.part.Part.run", start)
    case = words.replace("--values 1,2", "--over drafters --values 1,2")
    assert main(["bench", *case.split(), "--shape", "tiny", "--device", "cpu"]) == 2
    said = error(capsys)
    assert f"error: {told}" in said
    assert len(said.splitlines()) <= 2


def test_a_device_is_named_once_in_what_there_is(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["bench", "--shape", "tiny", "--device", "cuda:7"]) == 2
    assert error(capsys) == "error: there is no device 'cuda:7'\nhint: there is cpu\n"


def test_a_gpu_that_is_required_and_not_there_is_exit_three(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["bench", "--shape", "tiny", "--require-gpu"]) == 3
    assert "--require-gpu: torch finds no usable GPU here" in error(capsys)


def test_scaling_sweeps_the_values_in_order(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(good())
    asked: list[object] = []

    def run(_plan: BenchPlan, over: str, values: object, *, say: object) -> Bench:
        asked.extend((over, values, say))
        return sample().model_copy(update={"rows": CURVE})

    monkeypatch.setattr(scaling, "run_scaling", run)
    words = "--over num_anchors --values 64,32 --shape tiny"
    assert main(["bench", "scaling", *words.split()]) == 0
    assert asked[:2] == ["num_anchors", [32, 64]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--over drafters --values 1,2 --drafters 3", "--drafters 3 says what --over drafters"),
        (
            "--over token_budget --values 128,256 --set token_budget=512",
            "--set token_budget=512 says what --over token_budget",
        ),
        (
            f"--values 128,256 --config {ROOT}/configs/quickstart.toml --set data.token_budget=5",
            "--set data.token_budget=5 says what --over token_budget",
        ),
    ],
)
def test_what_is_swept_is_said_once(
    answer: Answer, capsys: Capture, *, words: str, told: str
) -> None:
    plans = answer(good())
    assert main(["bench", "scaling", "--shape", "tiny", *words.split()]) == 2
    assert told in error(capsys)
    assert plans == []


@pytest.mark.parametrize("values", ["8192", "a,b", "8192,8192", "0,1", "1,", "-1,2"])
def test_values_are_two_or_more_different_numbers(
    answer: Answer, capsys: Capture, values: str
) -> None:
    answer(good())
    assert main(["bench", "scaling", f"--values={values}"]) == 2
    assert "two or more different whole numbers" in error(capsys)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from dflash.cli.__main__ import main;"
        "codes = [main(['bench', *w, '--help']) for w in ((), ('compare',), ('scaling',))];"
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert ran.returncode == 0
    assert b"--expect 'EXPR'" in ran.stdout
