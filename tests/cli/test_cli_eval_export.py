"""eval and export from the command line, with the shipped target and a random drafter."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash.cli.__main__ import main
from dflash.decode import Decoded, plain_decode
from dflash.train import evaluation


def test_eval_of_a_run_decodes_its_held_out_prompts(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run_dir.rglob("*"))
    assert main(["eval", str(run_dir), "--max-new-tokens", "6", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "prompt 2/2" in shown.err
    assert "tokens per verify step, 2 prompts" in shown.out
    assert "speed-up" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 78
    assert sorted(run_dir.rglob("*")) == before, "evaluating writes nothing into the run"


def test_eval_prints_only_json_when_asked_to(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        json.dumps({"prompt": "import sys\n"})
        + "\n"
        + json.dumps({"messages": [{"role": "user", "content": "hi"}]})
        + "\n"
    )
    arguments = ["eval", str(run_dir), "--prompts", str(prompts), "--max-new-tokens", "5"]
    arguments += ["--device", "cpu", "--num-plain-prompts", "1"]
    assert main([*arguments, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["step"], report["num_prompts"]) == ("eval", 40, 2)
    assert report["target"] == "stdlib-lm"
    assert report["dtype"] == "float32"
    assert 1.0 <= report["tau"] <= 4.0
    assert len(report["accepted_per_position"]) == 3
    assert report["speedup"] > 0
    assert report["decode_loop"] == "eager"
    assert "CUDA devices only" in report["eager_because"]
    written = tmp_path / "report.json"
    assert main([*arguments, "--num-prompts", "1", "--json", str(written)]) == 0
    assert json.loads(written.read_text())["num_prompts"] == 1


def test_eval_never_replaces_the_prompts_that_it_reads(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\n")
    words = ["eval", str(run_dir), "--prompts", str(prompts), "--json", str(prompts)]
    assert main(words) == 2
    assert "would replace a file that this command reads" in capsys.readouterr().err
    assert prompts.read_text() == "def f(x):\n"


def test_an_interrupted_eval_keeps_what_it_decoded_and_says_so(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(run_dir), "--max-new-tokens", "6", "--device", "cpu", "--json"]
    assert main([*arguments, str(tmp_path / "whole.json")]) == 0
    whole = json.loads((tmp_path / "whole.json").read_text())
    calls: list[object] = []

    def plain(*given: object, **more: object) -> Decoded:
        calls.append(given)
        if len(calls) == 3:  # the warm-up's, the first prompt's, the second's
            raise KeyboardInterrupt
        return plain_decode(*given, **more)  # type: ignore[arg-type]

    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "plain_decode", plain)
        assert main([*arguments, str(tmp_path / "cut.json")]) == 130
    shown = capsys.readouterr()
    assert "1 of 2 prompts: incomplete" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 78
    cut = json.loads((tmp_path / "cut.json").read_text())
    assert (whole["complete"], cut["complete"], cut["num_prompts"]) == (True, False, 1)
    assert cut["tau_per_prompt"] == whole["tau_per_prompt"][:1]
    assert cut["speedup"] > 0


def test_an_eval_that_is_interrupted_before_its_first_prompt_has_nothing_to_keep(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **_more: object) -> Decoded:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "speculative_decode", interrupt)
    out = tmp_path / "cut.json"
    assert main(["eval", str(run_dir), "--device", "cpu", "--json", str(out)]) == 130
    assert list(tmp_path.iterdir()) == []


def test_export_writes_a_verified_folder_that_eval_takes_with_its_target(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    assert main(["export", str(run_dir), str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["step"]) == ("z-lab", 40)
    assert report["files"] == ["README.md", "config.json", "model.safetensors"]
    assert {w.dtype for w in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    arguments = ["generate", str(out), "--prompt", "x", "--max-new-tokens", "3", "--device", "cpu"]
    assert main(arguments) == 2
    assert "does not say which target" in capsys.readouterr().err
    assert main([*arguments, "--target", "stdlib-lm"]) == 0


def test_export_to_speculators_takes_embedding_and_head_from_the_target(
    run_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    assert main(["export", str(run_dir), str(out), "--to", "speculators"]) == 0
    weights = load_file(out / "model.safetensors")
    assert weights["embed_tokens.weight"].shape == (272, 192)
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "stdlib-lm"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["eval", "nowhere"], 13, "there is no checkpoint folder at nowhere"),
        (["eval", "RUN", "--device", "cuda:99"], 2, "there is no device 'cuda:99' here"),
        (["eval", "RUN", "--target", "nowhere"], 3, "there is no such file or folder"),
        (["eval", "RUN", "--prompts", "p.pdf"], 12, "prompts are read from .jsonl or .txt"),
        (
            ["eval", "RUN", "--prompts", "p.txt"],
            12,
            "p.txt: cannot be read (there is no such file)",
        ),
        (["eval", "RUN/checkpoints", "--prompts", "p.txt"], 13, "neither a run folder"),
        (["generate", "RUN"], 2, "give either --prompt or --chat"),
        (["generate", "RUN", "--prompt", "a", "--chat", "b"], 2, "give either --prompt or"),
        (["generate", "RUN", "--prompt", ""], 2, "the prompt is empty"),
        (["export", "RUN", "RUN"], 2, "exists already and is not an empty folder"),
        (["export", "RUN", "out", "--to", "onnx"], 2, "onnx"),
        (["export", "RUN", "out", "--target", "stdlib-lm"], 2, "--target belongs to --to specul"),
        (["export", "RUN", "."], 2, "holds the current one"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    words = [word.replace("RUN", str(run_dir)) for word in arguments]
    assert main(words) == code
    assert says in capsys.readouterr().err


def test_an_export_to_speculators_is_named_when_it_is_to_be_read(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    assert main(["export", str(run_dir), str(out), "--to", "speculators"]) == 0
    for words in (["generate", str(out), "--prompt", "x"], ["eval", str(out)]):
        capsys.readouterr()
        assert main(words) == 13
        said = capsys.readouterr().err.splitlines()
        assert said[0].startswith("error: the drafter is in the layout of the speculators library")
        assert said[1].startswith("hint: name the run, the checkpoint or the z-lab folder")


@pytest.mark.parametrize("command", ["eval", "generate", "export"])
def test_the_help_says_which_checkpoint_a_run_means(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "of a run the checkpoint with the longest measured tau, the earliest if equal" in words


def test_a_run_without_a_checkpoint_says_so(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text((run_dir / "config.toml").read_text())
    for _ in range(2):
        assert main(["eval", str(tmp_path)]) == 13
        said = capsys.readouterr().err
        assert f"the run {tmp_path} has no complete checkpoint yet" in said
        assert "hint: one is saved every checkpoint.every_steps steps" in said
        (tmp_path / "checkpoints").mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("eval RUN --target gone", 3, "--target = 'gone': there is no such file or folder"),
        ("eval RUN --target file", 2, "--target = 'file' is neither a folder nor a .gguf file"),
        ("generate RUN --prompt x --target empty", 3, "empty holds no config.json"),
        ("data prepare r.jsonl --out o --tokenizer gone", 3, "--tokenizer = 'gone': there is no"),
        ("data prepare r.jsonl --out o --tokenizer empty", 2, "--tokenizer: empty cannot be read"),
        ("data inspect r.jsonl --tokenizer gone", 3, "--tokenizer = 'gone': there is no such"),
        ("data synthesize --num 1 --out o --target gone", 3, "--target = 'gone': there is no such"),
    ],
)
def test_an_option_that_names_a_model_is_called_by_its_own_name(  # noqa: PLR0917
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    words: str,
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("empty").mkdir()
    assert main(words.replace("RUN", str(run_dir)).split()) == code
    said = capsys.readouterr().err
    assert says in said
    assert "target.model" not in said


def test_a_target_that_is_gone_is_said_to_be_the_drafters(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((run_dir / "checkpoints/step-00000040/manifest.json").read_text())
    manifest["target"]["source"] = "gone"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["eval", str(tmp_path), "--prompts", "human-eval"]) == 3
    said = capsys.readouterr().err
    assert f"the target of {tmp_path} = 'gone': there is no such file or folder" in said
    assert "say with --target where it is" in said


def test_another_target_than_trained_with_is_refused_unless_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run_dir / "checkpoints" / "step-00000040"
    folder = tmp_path / "step-00000040"
    folder.mkdir()
    (folder / "drafter.safetensors").write_bytes((source / "drafter.safetensors").read_bytes())
    manifest = json.loads((source / "manifest.json").read_text())
    manifest["target"]["fingerprint"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    arguments = ["generate", str(folder), "--prompt", "x", "--max-new-tokens", "2"]
    assert main([*arguments, "--device", "cpu"]) == 13
    assert "is not the one that" in capsys.readouterr().err
    assert main([*arguments, "--device", "cpu", "--target", "stdlib-lm"]) == 0
    assert "note: stdlib-lm is not the target" in capsys.readouterr().err


def test_a_drafter_of_other_sizes_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = Path(__file__).parents[1] / "golden"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n")
    arguments = ["eval", str(golden), "--target", "stdlib-lm", "--prompts", str(prompts)]
    assert main([*arguments, "--device", "cpu"]) == 13
    assert "its hidden_size is 32, the target's 192" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [prompts]
