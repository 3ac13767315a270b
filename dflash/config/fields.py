"""What a configuration field knows about itself, and how it says what it expects.

Not here: the fields (``sections``), rules between fields (``rules``).
"""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

PLAIN_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
BOUND_WORDS: dict[type, tuple[str, str]] = {
    Ge: ("ge", "at least {}"),
    Gt: ("gt", "above {}"),
    Le: ("le", "at most {}"),
    Lt: ("lt", "below {}"),
    MultipleOf: ("multiple_of", "a multiple of {}"),
    MinLen: ("min_length", "not empty"),
}


class Section(BaseModel):
    """One table of the file: frozen, strict (``true`` is no number), no unknown keys, no nan."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )


def knob(
    default: object,
    description: str,
    *,
    unit: str = "",
    source: str = "",
    expects: str = "",
    **bounds: object,
) -> Any:  # noqa: ANN401 - stands for a value of the field's own type
    """A field with what its reader must know; *expects* replaces the phrase made from the type.

    A default of ``...`` makes the field required; ``None`` makes it absent until it is set.
    """
    facts = {"unit": unit, "source": source, "expects": expects}
    shown = {name: text for name, text in facts.items() if text}
    make_field: Any = Field  # its overloads do not take bounds as a mapping
    return make_field(default, description=description, json_schema_extra=shown, **bounds)


def fact(field: FieldInfo, name: Literal["unit", "source", "expects"]) -> str:
    extra = field.json_schema_extra
    return str(extra.get(name, "")) if isinstance(extra, dict) else ""


def expectation(field: FieldInfo) -> str:
    """The values the field takes, in words: ``a whole number, at least 1``."""
    words = fact(field, "expects") or _type_words(field.annotation)
    limits = [
        pattern.format(getattr(bound, name))
        for bound in field.metadata
        for kind, (name, pattern) in BOUND_WORDS.items()
        if isinstance(bound, kind) and not (kind is not MinLen and fact(field, "expects"))
    ]
    return ", ".join([words, *limits])


def _type_words(annotation: object) -> str:
    kind, arms = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is typing.Annotated:
        return _type_words(arms[0])
    if kind is Literal:
        return " or ".join(f'"{arm}"' for arm in arms)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(_type_words(arm) for arm in arms if arm is not type(None))
    if kind is tuple:
        many = "" if arms[-1] is Ellipsis else f"{len(arms)} "
        item = _type_words(arms[0])
        item = item if '"' in item else item.removeprefix("a ") + "s"
        return f"a list of {many}{item}"
    return PLAIN_WORDS[typing.cast("type", annotation)]


def fields_of(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """``("optim.lr", field)`` for every value, in the order of declaration."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from ((f"{name}.{key}", leaf) for key, leaf in fields_of(inner))
        else:
            yield name, field


def values_of(config: BaseModel) -> dict[str, Any]:
    """Every value by dotted key, in the order of declaration."""
    values: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            values |= {f"{name}.{key}": inner for key, inner in values_of(value).items()}
        else:
            values[name] = value
    return values
