"""TOML file and overrides in, a valid :class:`RunConfig` out, or every problem at once.

Precedence: override ``optim.lr=3e-4`` over the file over the default in ``sections``.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from dflash.config.fields import expectation, fields_of, values_of
from dflash.config.rules import broken_rules
from dflash.config.sections import RunConfig
from dflash.config.text import starter_config, toml_value
from dflash.errors import ConfigError

Origin = Literal["default", "file", "override"]
FIELDS = dict(fields_of(RunConfig))
TABLES = tuple(name for name in RunConfig.model_fields if name not in FIELDS)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid config, and for every dotted key where its value came from."""

    config: RunConfig
    origin: dict[str, Origin]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong: a dotted key (or an override as it was typed) and the rule it breaks."""

    key: str
    text: str

    def __str__(self) -> str:
        return self.text if self.text.startswith(self.key) else f"{self.key}: {self.text}"


def load(path: Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read *path*, apply *overrides* (``optim.lr=3e-4``, a bare word is a string), validate.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or breaks any rule; lists all of them.
    """
    loaded, problems = examine(path, overrides)
    if loaded is None:
        raise ConfigError(problem_report(path, problems))
    return loaded


def problem_report(path: Path | None, problems: Sequence[Problem]) -> str:
    many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return f"{path or 'the configuration'} has {many}:{lines}"


def examine(
    path: Path | None, overrides: Sequence[str] = ()
) -> tuple[Loaded | None, list[Problem]]:
    """Like :func:`load`, but hands problems back; only an unreadable file raises."""
    tree, overridden, problems = _read(path, overrides)
    values = dict(_leaves(tree))
    config, found = _validate(tree, values)
    problems += found
    if config is None or problems:
        return None, problems
    origin: dict[str, Origin] = {
        key: "override" if key in overridden else "file" if key in values else "default"
        for key in FIELDS
    }
    return Loaded(config, origin), []


def sound_part(
    path: Path | None, overrides: Sequence[str], problems: Sequence[Problem]
) -> RunConfig | None:
    """What :func:`examine` read without the keys of *problems*, so that the rest can be judged.

    A required key that is missing has the value of ``starter_config``; None where no whole
    configuration can be made of it.
    """
    tree, _, _ = _read(path, overrides)
    bad = {problem.key for problem in problems}
    kept = {
        key: value
        for key, value in _leaves(tree)
        if key in FIELDS and key not in bad and key.partition(".")[0] not in bad
    }
    starter = values_of(starter_config())
    needed = {key for key, field in FIELDS.items() if field.is_required()}
    if not {"optim.max_steps", "optim.epochs"} & kept.keys():
        needed.add("optim.max_steps")
    sound: dict[str, Any] = {}
    for key, value in ({key: starter[key] for key in needed} | kept).items():
        table, _, name = key.rpartition(".")
        (sound.setdefault(table, {}) if table else sound)[name] = value
    try:
        return RunConfig.model_validate(sound)
    except ValidationError:
        return None


def _read(
    path: Path | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], set[str], list[Problem]]:
    """The file's tree with *overrides* put into it, their keys, and what is wrong with them."""
    tree = {} if path is None else read_toml(path)
    problems: list[Problem] = []
    overridden: set[str] = set()
    for item in overrides:
        problems += _apply(tree, item, overridden)
    return tree, overridden, problems


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = "dflash config init run.toml writes one"
        raise ConfigError(f"no configuration file at {path}", hint=hint) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _apply(tree: dict[str, Any], item: str, overridden: set[str]) -> Iterator[Problem]:
    """Put one ``key=value`` into *tree*."""
    key, sign, raw = item.partition("=")
    key = key.strip()
    if not sign or not key:
        yield Problem(item, "an override is written key=value, such as optim.lr=3e-4")
    elif key in TABLES:
        yield Problem(item, f"{key} is a table; override one of its keys, such as {_first_of(key)}")
    elif key not in FIELDS:
        yield Problem(item, f"unknown key{_did_you_mean(key)}")
    else:
        table, _, name = key.rpartition(".")
        place = tree.setdefault(table, {}) if table else tree
        if isinstance(place, dict):  # otherwise the file's own mistake is reported
            place[name] = _parse(raw)
            overridden.add(key)


def _first_of(table: str) -> str:
    return next(key for key in FIELDS if key.startswith(f"{table}."))


def _parse(raw: str) -> object:
    """A TOML value; anything that is none stands for itself as a string."""
    try:
        tree = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw.strip()
    return tree["value"] if tree.keys() == {"value"} else raw


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if name in TABLES and isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def _validate(
    tree: dict[str, Any], values: dict[str, Any]
) -> tuple[RunConfig | None, list[Problem]]:
    """Types and bounds by pydantic, then the rules between the keys that are sound so far."""
    config, problems = None, []
    try:
        config = RunConfig.model_validate({name: {} for name in TABLES} | tree)
    except ValidationError as error:
        places = dict.fromkeys(
            ".".join(str(part) for part in detail["loc"][:2]) for detail in error.errors()
        )
        keys = [_blamed(place) for place in places if place]
        problems = [_problem(key, values) for key in dict.fromkeys(keys)]
    bad = {problem.key for problem in problems}
    skip = [key for key in FIELDS if key in bad or key.partition(".")[0] in bad]
    defaults = {key: field.get_default() for key, field in FIELDS.items()}
    broken = broken_rules(defaults | values, skip=skip)
    return config, problems + [Problem(rule.key, rule.text) for rule in broken]


def _blamed(place: str) -> str:
    """The dotted key of a pydantic location, whose second part may be an item of a list."""
    table = place.partition(".")[0]
    return place if table in TABLES else table


def _problem(key: str, values: Mapping[str, Any]) -> Problem:
    if key in TABLES:
        return Problem(key, f"expected a [{key}] table, got {toml_value(values[key])}")
    if key not in FIELDS:
        return Problem(key, f"unknown {_table_or_key(values[key])}{_did_you_mean(key)}")
    expected = expectation(FIELDS[key])
    if key not in values:
        return Problem(key, f"required but not set; expected {expected}")
    return Problem(key, f"expected {expected}, got {toml_value(values[key])}")


def _table_or_key(value: object) -> str:
    return "table" if isinstance(value, Mapping) else "key"


def _did_you_mean(key: str) -> str:
    """The nearest key of the same table, else the same or nearest name anywhere."""
    table, _, name = key.rpartition(".")
    siblings = {
        other.rpartition(".")[2]: other for other in FIELDS if other.startswith(f"{table}.")
    }
    names = {other.rpartition(".")[2]: other for other in FIELDS}
    tables = {other: f"[{other}]" for other in TABLES}
    for candidates, word in ((siblings, name), (names, name), (tables, key), (tables, table)):
        near = difflib.get_close_matches(word, candidates, n=1, cutoff=0.7)
        if near:
            return f"; did you mean {candidates[near[0]]}?"
    near = difflib.get_close_matches(key, FIELDS, n=1)
    return f"; did you mean {near[0]}?" if near else ""
