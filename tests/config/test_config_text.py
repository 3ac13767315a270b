"""A configuration written out loads back equal; every field says what it is."""

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from dflash.config import (
    DataConfig,
    DrafterConfig,
    EvalConfig,
    LogConfig,
    ObjectiveConfig,
    OptimConfig,
    RunConfig,
    TargetConfig,
    expectation,
    fields_of,
    load,
    resolved_devices,
    resolved_dtype,
    resolved_gamma,
    starter_config,
    to_toml,
    values_of,
)

CONFIGS = Path(__file__).parents[2] / "configs"
ODD_TEXT = 'a "quoted" \\ path\twith \x7f \x01 ü 漢 🙂\nand # more'
EVERYTHING = RunConfig(
    seed=2**63 - 1,
    target=TargetConfig(model=ODD_TEXT, taps=(5, 1), devices=("cuda:1", "cpu"), dtype="bf16"),
    drafter=DrafterConfig(
        mask_token_id=7, num_heads=4, num_kv_heads=2, head_dim=8, init_from="out", block_size=10
    ),
    data=DataConfig(train=(ODD_TEXT, "b"), heldout=("c",), anchor_density=1 / 3),
    objective=ObjectiveConfig(kind="dpace", dpace_alpha=0.1 + 0.2),
    optim=OptimConfig(lr=1e-30, betas=(0, 0.1), max_steps=3),
    eval=EvalConfig(every_steps=1),
    log=LogConfig(sinks=("jsonl", "tensorboard")),
)


def named_keys(text: str) -> list[str]:
    """Dotted keys that a file sets, or shows in a comment as absent."""
    table, named = "", []
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif match := re.match(r"(?:# )?(\w+) =( |$)", line):
            named.append(table + match[1])
    return named


@pytest.mark.parametrize("config", [starter_config(), EVERYTHING], ids=["starter", "everything"])
@pytest.mark.parametrize("comments", [False, True])
def test_a_written_configuration_loads_back_equal(
    tmp_path: Path, config: RunConfig, *, comments: bool
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config, comments=comments), encoding="utf-8")
    assert load(path).config == config


def test_a_commented_file_names_every_key() -> None:
    named = named_keys(to_toml(starter_config(), comments=True))
    assert named == [key for key, _ in fields_of(RunConfig)]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_a_shipped_configuration_is_valid_and_names_every_key(path: Path) -> None:
    load(path)
    named = named_keys(path.read_text(encoding="utf-8"))
    assert named == [key for key, _ in fields_of(RunConfig)]


def test_every_field_says_what_it_is_and_what_it_takes() -> None:
    for key, field in fields_of(RunConfig):
        assert field.description, key
        assert expectation(field), key


def test_a_configuration_cannot_be_changed() -> None:
    config = starter_config()
    with pytest.raises(ValidationError):
        config.optim.lr = 1.0


def test_a_configuration_made_in_python_keeps_the_rules() -> None:
    with pytest.raises(ValidationError, match="set exactly one of"):
        RunConfig(target=TargetConfig(model="m"), data=DataConfig(train=("a",)))


def test_values_are_listed_by_dotted_key() -> None:
    values = values_of(EVERYTHING)
    assert list(values) == [key for key, _ in fields_of(RunConfig)]
    assert (values["seed"], values["target.taps"]) == (2**63 - 1, (5, 1))


def test_the_schema_carries_units_and_sources() -> None:
    properties = RunConfig.model_json_schema()["$defs"]["OptimConfig"]["properties"]
    assert properties["max_steps"]["unit"] == "steps"
    assert properties["lr"]["source"] == "arXiv 2602.06036 A.1"


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 1.5), (32, 15.5)]
)
def test_gamma_follows_the_block_size(block_size: int, gamma: float) -> None:
    config = starter_config().model_copy(update={"drafter": DrafterConfig(block_size=block_size)})
    assert resolved_gamma(config) == gamma


def test_a_gamma_that_is_set_is_taken() -> None:
    config = starter_config().model_copy(update={"objective": ObjectiveConfig(gamma=3)})
    assert resolved_gamma(config) == 3.0


def test_auto_devices_follow_the_machine() -> None:
    assert resolved_devices(("auto",), num_cuda=2) == ("cuda:0",)
    assert resolved_devices(("auto",), num_cuda=0) == ("cpu",)
    assert resolved_devices(("cuda:1", "cpu"), num_cuda=0) == ("cuda:1", "cpu")


def test_auto_dtype_follows_the_devices() -> None:
    assert resolved_dtype("auto", devices=("cuda:0", "cuda:1")) == "bf16"
    assert resolved_dtype("auto", devices=("cuda:0", "cpu")) == "fp32"
    assert resolved_dtype("bf16", devices=("cpu",)) == "bf16"


def test_the_default_recipe_is_the_paper_s() -> None:
    text = tomllib.loads(to_toml(starter_config()))
    assert text["optim"]["lr"] == 6e-4
    assert text["optim"]["warmup_ratio"] == 0.04
    assert text["optim"]["clip_norm"] == 1.0
    assert (text["drafter"]["num_layers"], text["drafter"]["block_size"]) == (5, 16)
    assert text["data"]["anchor_density"] * 3072 == 512


def rules_in(text: str) -> list[str]:
    """What a commented file says of values: of what kind, between which ends, from which source."""
    return [line for line in text.splitlines() if re.match(r"#   \S", line)]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_a_shipped_file_says_of_every_key_what_the_code_asks_of_it(path: Path) -> None:
    current = rules_in(to_toml(starter_config(), comments=True))
    said = rules_in(path.read_text())
    assert said
    assert [line for line in said if line not in current] == []
