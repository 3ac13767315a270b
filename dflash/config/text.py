"""Configuration out: TOML that loads back equal, with or without comments."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial

from pydantic.fields import FieldInfo

from dflash.config.fields import expectation, fact, fields_of, values_of
from dflash.config.sections import DataConfig, OptimConfig, RunConfig, TargetConfig

COMMENT_COLUMNS = 98
DELETE = "\x7f"  # the one control character that JSON leaves alone and TOML does not


def toml_value(value: object) -> str:
    """*value* in TOML syntax; what TOML has no word for is shown as Python writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(DELETE, "\\u007f")
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{name} = {toml_value(inner)}" for name, inner in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value) if isinstance(value, int | float) else str(value)


def to_toml(config: RunConfig, *, comments: bool = False) -> str:
    """The whole configuration as TOML; ``load`` gives an equal one back.

    Absent keys are left out, or with *comments* shown as a comment: TOML has no null.
    """
    fields, lines, open_table = dict(fields_of(RunConfig)), [], ""
    for key, value in values_of(config).items():
        table, _, name = key.rpartition(".")
        if table != open_table:
            lines += ["", *_table_comment(table, shown=comments), f"[{table}]"]
            open_table = table
        if comments:
            lines += _about(fields[key])
        if value is not None:
            lines.append(f"{name} = {toml_value(value)}")
        elif comments:
            lines.append(f"# {name} =")
    return "\n".join(lines) + "\n"


def starter_config() -> RunConfig:
    """Defaults, with what is required set to what ships with dflash and the paper's 6 epochs."""
    return RunConfig(
        target=TargetConfig(model="stdlib-lm"),
        data=DataConfig(train=("stdlib:train",), heldout=("stdlib:heldout",)),
        optim=OptimConfig(epochs=6),
    )


def _table_comment(table: str, *, shown: bool) -> list[str]:
    model = RunConfig.model_fields[table].annotation
    return [f"# {model.__doc__}"] if shown and model is not None else []


def _about(field: FieldInfo) -> list[str]:
    """What the field is, then what it takes, as comment lines."""
    source = fact(field, "source")
    parts = [expectation(field), fact(field, "unit"), f"source: {source}" if source else ""]
    takes = " | ".join(part for part in parts if part)
    wrap = partial(textwrap.wrap, width=COMMENT_COLUMNS, break_long_words=False)
    return [
        *wrap(field.description or "", initial_indent="# ", subsequent_indent="# "),
        *wrap(takes, initial_indent="#   ", subsequent_indent="#   "),
    ]
