"""``dflash config init|check|show|schema``: configurations, without a GPU.

Only ``check`` imports torch, and only where a configuration asks something of its devices.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from dflash.cli.output import print_json, print_table, talk
from dflash.config import (
    Loaded,
    Problem,
    RunConfig,
    examine,
    expectation,
    fact,
    fields_of,
    load,
    problem_report,
    sound_part,
    starter_config,
    to_toml,
    toml_value,
    values_of,
)
from dflash.errors import ConfigError, MissingError, UsageError

config_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="such as optim.lr=3e-4")
]
DEVICE_KEYS = ("target", "drafter", "target.devices", "drafter.devices")
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON value on stdout")]


@config_app.command()
def init(
    path: Annotated[Path | None, typer.Argument(help="file to write; none prints it")] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="overwrite the file")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented file with every key at its default."""
    text = to_toml(starter_config(), comments=True)
    if path is not None:
        _write_new(path, text, force=force)
        talk(f"wrote {path}")
    if as_json:
        print_json({"path": None if path is None else str(path), "toml": text})
    elif path is None:
        print(text, end="")


@config_app.command()
def check(config: ConfigFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Find everything that is wrong with a configuration, at once.

    What the devices cannot do is wrong too: "auto" and "cpu" are those of this machine. A file, a
    package or a GPU that is named and not here is only noted, since another machine may have it.
    """
    loaded, problems = examine(config, overrides or ())
    sound = loaded.config if loaded else sound_part(config, overrides or (), problems)
    notes = [] if loaded is None else [*missing_files(loaded.config), *missing_packages(sound)]
    if sound is not None and not any(problem.key in DEVICE_KEYS for problem in problems):
        refused, absent = device_problems(sound)
        problems, notes = [*problems, *refused], [*notes, *absent]
    if as_json:
        found = [{"key": problem.key, "text": problem.text} for problem in problems]
        print_json({"ok": not problems, "problems": found, "notes": notes})
    for note in notes:
        talk(f"note: {note}")
    if problems and as_json:
        raise typer.Exit(ConfigError.exit_code)
    if problems:
        raise ConfigError(problem_report(config, problems))
    if not as_json:
        print(f"{config} is a valid configuration")


@config_app.command()
def show(config: ConfigFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Show every value with its unit and where it came from."""
    loaded = load(config, overrides or ())
    if as_json:
        print_json(_shown(loaded))
        return
    rows = [
        (key, _cell(entry["value"]), str(entry["unit"]), str(entry["origin"]))
        for key, entry in _shown(loaded).items()
    ]
    print_table(("key", "value", "unit", "origin"), rows)


@config_app.command()
def schema(*, as_json: AsJson = False) -> None:
    """Print the JSON schema of a configuration file."""
    del as_json  # a schema is JSON in any case; every command takes the option
    print_json(RunConfig.model_json_schema())


def missing_files(config: RunConfig) -> list[str]:
    """What the configuration names that is not on this machine: right elsewhere, so no error."""
    named = [("target.model", config.target.model)]
    named += [(f"data.train[{i}]", source) for i, source in enumerate(config.data.train)]
    named += [(f"data.heldout[{i}]", source) for i, source in enumerate(config.data.heldout)]
    if config.drafter.init_from is not None:
        named.append(("drafter.init_from", config.drafter.init_from))
    return [
        f"{key} = {toml_value(name)}: there is no such file or folder here"
        for key, name in named
        if not name.partition(":")[0].startswith("stdlib") and not Path(name).exists()
    ]


def missing_packages(config: RunConfig | None) -> list[str]:
    """The sentences of what *config* needs installed and is not."""
    from dflash.report.tensorboard import require_tensorboard

    if config is None or "tensorboard" not in config.log.sinks:
        return []
    try:
        require_tensorboard()
    except MissingError as error:
        return [error.what]
    return []


def device_problems(config: RunConfig) -> tuple[list[Problem], list[str]]:
    """What ``dflash train`` would refuse on any machine with such devices, and what only here."""
    if not _asks_of_devices(config):
        return [], []
    if find_spec("torch") is None:
        return [], ["the devices were not checked: torch is not installed"]
    from dflash.train.devices import refusals

    found = refusals(config)
    problems = [
        Problem(each.key, f"{each.error.what}; {each.error.hint}")
        for each in found
        if not each.is_absent
    ]
    notes = [
        f"{each.error.what}; dflash train refuses that here" for each in found if each.is_absent
    ]
    return problems, notes


def _asks_of_devices(config: RunConfig) -> bool:
    """Whether a machine could refuse it; importing torch takes seconds."""
    drafters = set(config.drafter.devices)
    return not (
        drafters | set(config.target.devices) <= {"auto", "cpu"}
        and config.execution.mode in ("auto", "eager")
        and config.execution.gradient_sum != "nccl"
        and config.precision.matmul == "bf16"
        and (config.drafter.head_dim is None or drafters == {"cpu"})
    )


def _shown(loaded: Loaded) -> dict[str, dict[str, object]]:
    fields = dict(fields_of(RunConfig))
    return {
        key: {
            "value": value,
            "unit": fact(fields[key], "unit"),
            "origin": loaded.origin[key],
            "description": fields[key].description,
            "expects": expectation(fields[key]),
        }
        for key, value in values_of(loaded.config).items()
    }


def _cell(value: object) -> str:
    return "absent" if value is None else toml_value(value)


def _write_new(path: Path, text: str, *, force: bool) -> None:
    if path.exists() and not force:
        raise UsageError(f"{path} exists already", hint="--force overwrites it")
    beside = path.with_name(f"{path.name}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
