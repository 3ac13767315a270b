"""Which options ``dflash diagnose`` takes for which task; what it would ignore is refused."""

from collections.abc import Iterable, Sequence
from typing import Literal

import typer

from dflash.errors import UsageError

Task = Literal["schema", "run", "list", "modes", "all"]
CALLED: dict[Task, str] = {
    "schema": "dflash diagnose --schema",
    "run": "dflash diagnose run RUN_DIR",
    "list": "the list of failure modes",
    "modes": "dflash diagnose SLUG",
    "all": "dflash diagnose all",
}
TAKEN_BY: dict[str, tuple[Task, ...]] = {
    "words": ("run", "list", "modes", "all"),
    "level": ("list", "modes", "all"),  # the list says how many launches there would be
    "trials": ("list", "modes", "all"),
    "timeout": ("modes", "all"),
    "targets": ("all",),
    "drafters": ("all",),
    "step": ("modes", "all"),
    "json_out": ("run", "list", "modes", "all"),
    "junit": ("modes", "all"),
    "html": ("modes", "all"),
    "require_gpu": ("list", "modes", "all"),
    "fail_on": ("run", "modes", "all"),
    "list_only": ("list", "modes", "all"),  # which it turns into a list
    "schema": ("schema",),
}


def task_of(words: Sequence[str], *, listed: bool, schema: bool) -> Task:
    """What is to be done, by the words of the command line and its two options that say so.

    Raises:
        UsageError: words that name nothing.
    """
    if schema:
        return "schema"
    if words[:1] == ["watch"]:
        raise UsageError(
            "options of dflash diagnose watch go behind that word",
            hint="dflash diagnose watch --json FILE -- python train.py ...",
        )
    if words[:1] == ["run"]:
        if len(words) != 2:  # noqa: PLR2004 - the word and the folder
            what = "dflash diagnose run takes one RUN_DIR"
            raise UsageError(what, hint="dflash diagnose run runs/x")
        return "run"
    from dflash.diagnose.select import ALL, require_slugs

    require_slugs(words)
    if listed or not words:
        return "list"
    return "all" if ALL in words else "modes"


def refuse_others(context: typer.Context, task: Task) -> None:
    """Refuse what was given on the command line and *task* has no use for, and what is empty.

    Raises:
        UsageError: there is such an option; all are named, each with where it belongs.
    """
    given = [
        each.name
        for each in context.command.params
        if each.name in TAKEN_BY and _is_given(context, each.name)
    ]
    others = [name for name in given if task not in TAKEN_BY[name]]
    if others:
        what = f"{CALLED[task]} takes no {' and no '.join(_shown(context, others))}"
        raise UsageError(what, hint="; ".join(_homes(context, others)))
    empty = [name for name in given if context.params[name] == ""]
    if empty:
        names = " and ".join(_shown(context, empty))
        raise UsageError(f"{names} is empty", hint="give it a value or leave it out")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _shown(context: typer.Context, names: Iterable[str]) -> list[str]:
    options = {each.name: each.opts[0] for each in context.command.params}
    return ["words" if name == "words" else options[name] for name in names]


def _homes(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Where options belong, those of one place together."""
    homes: dict[tuple[Task, ...], list[str]] = {}
    for name in names:
        homes.setdefault(TAKEN_BY[name], []).append(name)
    return [
        f"{' and '.join(_shown(context, those))} {'goes' if _is_one(those) else 'go'} with"
        f" {' or '.join(CALLED[task] for task in tasks)}"
        for tasks, those in homes.items()
    ]


def _is_one(names: Sequence[str]) -> bool:
    return len(names) == 1 and names[0] != "words"
