"""Configurations are strict: a typo, a wrong type or a broken rule is named, all at once."""

from pathlib import Path

import pytest

from dflash.config import examine, load
from dflash.errors import ConfigError

VALID = '[target]\nmodel = "stdlib-lm"\n[data]\ntrain = ["stdlib:train"]\n'
VALID_RUN = VALID + "[optim]\nmax_steps = 10\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def problems_of(path: Path, overrides: tuple[str, ...] = ()) -> set[str]:
    loaded, problems = examine(path, overrides)
    assert (loaded is None) == bool(problems)
    return {str(problem) for problem in problems}


def test_an_override_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    text = VALID + "[optim]\nmax_steps = 50\nlr = 1\n"
    loaded = load(write(tmp_path, text), ["optim.lr=3e-4", "objective.kind=dpace", "seed = 7"])
    config, origin = loaded.config, loaded.origin
    assert (config.optim.max_steps, config.optim.lr) == (50, 3e-4)
    assert (config.objective.kind, config.seed) == ("dpace", 7)
    assert origin["optim.max_steps"] == "file"
    assert origin["optim.lr"] == origin["objective.kind"] == origin["seed"] == "override"
    assert origin["drafter.block_size"] == "default"


def test_the_last_override_of_a_key_wins(tmp_path: Path) -> None:
    assert load(write(tmp_path, VALID_RUN), ["seed=1", "seed=2"]).config.seed == 2


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("target.taps=[3, 1]", (3, 1)),
        ("target.taps=auto", "auto"),
        ("target.taps='auto'", "auto"),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_word(
    tmp_path: Path, override: str, value: object
) -> None:
    assert load(write(tmp_path, VALID_RUN), [override]).config.target.taps == value


def test_every_problem_is_reported_at_once_with_its_key(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "lr = 3\nseed = true\n"
        "[optimizer]\nx = 1\n"
        '[optim]\nlr = nan\nbetas = [1, 2, 3]\nepoch = 3\nclip_norm = -1\neps = "small"\n'
        '[data]\ntrain = "x"\ntoken_budget = 100\n'
        '[drafter]\nnum_heads = 3\nnum_kv_heads = 2\ndevices = ["cuda"]\nblock_size = true\n'
        '[log]\nsinks = ["jsonl", "tb"]\n'
        '[objective]\nkind = "dpase"\n'
        '[target]\ntaps = ["a"]\nmodel = ""\n',
    )
    positive = "expected a number, above 0, got"
    device = 'expected a list of "cpu" and "cuda:N", or ["auto"], not empty'
    sources = 'expected a list of files, folders, "stdlib:train" or "stdlib:heldout", not empty'
    taps = 'expected "auto" or a list of layer numbers, each at least 0, not empty'
    betas = "expected a list of 2 numbers, each at least 0 and below 1"
    length = "set exactly one of optim.max_steps and optim.epochs; neither is set"
    assert problems_of(path, ("optim.lrr=3", "data=3", "x")) == {
        "optim.lrr=3: unknown key; did you mean optim.lr?",
        "data=3: data is a table; override one of its keys, such as data.train",
        "x: an override is written key=value, such as optim.lr=3e-4",
        "lr: unknown key; did you mean optim.lr?",
        "seed: expected a whole number from 0 to 2**63 - 1, got true",
        "optimizer: unknown table; did you mean [optim]?",
        f"optim.lr: {positive} nan",
        f"optim.clip_norm: {positive} -1",
        f'optim.eps: {positive} "small"',
        f"optim.betas: {betas}, got [1, 2, 3]",
        "optim.epoch: unknown key; did you mean optim.epochs?",
        f"optim.max_steps: {length}",
        f'data.train: {sources}, got "x"',
        "data.token_budget: expected a whole number, at least 128, a multiple of 128, got 100",
        "drafter.num_heads: must be a multiple of drafter.num_kv_heads = 2, got 3",
        f'drafter.devices: {device}, got ["cuda"]',
        "drafter.block_size: expected a whole number, at least 2, at most 128, got true",
        'log.sinks: expected a list of "jsonl" or "tensorboard", not empty, got ["jsonl", "tb"]',
        'objective.kind: expected "decay" or "dpace", got "dpase"',
        f'target.taps: {taps}, got ["a"]',
        'target.model: expected a text, not empty, got ""',
    }


def test_an_empty_file_misses_what_is_required(tmp_path: Path) -> None:
    keys = {text.partition(":")[0] for text in problems_of(write(tmp_path, ""))}
    assert keys == {"target.model", "data.train", "optim.max_steps"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim = 3", "optim: expected a [optim] table, got 3"),
        ("[seed]\nx = 1", "seed: expected a whole number from 0 to 2**63 - 1, got { x = 1 }"),
        ("[optim]\nlr = inf", "optim.lr: expected a number, above 0, got inf"),
        ("[optim]\nblock_size = 3", "optim.block_size: unknown key; did you mean drafter.block_"),
        ("[drafter]\ndevices = []", 'or ["auto"], not empty, got []'),
        ("[drafter.deep]\nx = 1", "drafter.deep: unknown table"),
        ("zzz = 1979-05-27", "zzz: unknown key"),
        ("[execution]\nmode = 1979-05-27", 'or "graphed", got 1979-05-27'),
    ],
)
def test_nonsense_is_named_not_crashed_on(tmp_path: Path, text: str, says: str) -> None:
    assert says in "\n".join(problems_of(write(tmp_path, text)))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            ["optim.epochs=1"],
            r"optim.max_steps: set exactly one of .* not both \(\d+ and 1\): .* --max-steps \d+`",
        ),
        (["data.max_document_tokens=9000"], "must be at most data.token_budget = 8192, got 9000"),
        (["data.heldout=['stdlib:train']"], "'stdlib:train' is also in data.train"),
        (
            ["data.train=['stdlib:all']", "data.heldout=['stdlib:heldout']"],
            "'stdlib:heldout' is part of 'stdlib:all'",
        ),
        (["eval.every_steps=5"], "evaluating every 5 steps needs prompts in data.heldout"),
        (["target.taps=[1, 1]"], r"target.taps: names a layer twice: \[1, 1\]"),
        (["target.taps=[1, 2]", "target.num_taps=3"], "lists 2 layers but target.num_taps = 3"),
        (["target.devices=['cpu', 'cpu']"], "target.devices: names a device twice"),
        (["drafter.devices=['auto', 'cpu']"], 'drafter.devices: "auto" must stand alone'),
        (["drafter.head_dim=5"], "drafter.head_dim: must be even, got 5"),
        (["objective.kind=dpace", "objective.gamma=7"], "objective.gamma: has no effect with"),
        (["objective.dpace_alpha=0.3"], "objective.dpace_alpha: has no effect with"),
        (["log.sinks=['tensorboard']"], 'log.sinks: must contain "jsonl"'),
        (["log.sinks=['jsonl', 'jsonl']"], "log.sinks: names a sink twice"),
    ],
)
def test_rules_between_keys_hold(tmp_path: Path, override: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(write(tmp_path, VALID_RUN), override)


def test_a_rule_about_a_wrong_key_waits_until_that_key_is_right(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, VALID_RUN), ("data.token_budget=100",))
    assert {text.partition(":")[0] for text in found} == {"data.token_budget"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[optim", "is not valid TOML"),
        (b"seed = 1\nseed = 2", "is not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load(path)
    assert str(path) in caught.value.what


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file at") as caught:
        load(tmp_path / "none.toml")
    assert "config init" in caught.value.hint


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
