"""The table of commands. A command's module is imported only when that command is called."""

import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from dflash.errors import UsageError


class Command(NamedTuple):
    """Where a command lives, a function or a ``typer.Typer``, and its line in the help."""

    module: str
    attribute: str
    help: str
    runs_a_command: bool = False
    """Its options end at its first word: what follows is somebody else's command line."""


COMMANDS = {
    "train": Command("dflash.cli.train", "train", "train a drafter for a frozen target"),
    "eval": Command("dflash.cli.eval", "evaluate", "measure accepted length and speed by decoding"),
    "generate": Command("dflash.cli.generate", "generate", "stream text and show accepted blocks"),
    "data": Command("dflash.cli.data", "data_app", "prepare, inspect and synthesize training data"),
    "export": Command("dflash.cli.export", "export", "write a folder that serving engines load"),
    "config": Command("dflash.cli.config", "config_app", "write, check and show configurations"),
    "diagnose": Command("dflash.cli.diagnose", "diagnose", "reproduce failure modes and judge"),
    "diagnose watch": Command(
        "dflash.cli.diagnose_watch", "watch", "run your own program and diagnose it", True
    ),
    "bench": Command("dflash.cli.bench", "bench", "measure execution modes against each other"),
    "bench compare": Command("dflash.cli.bench_compare", "compare", "compare two of its files"),
    "bench scaling": Command("dflash.cli.bench_scaling", "scaling", "sweep one size of a shape"),
    "explain": Command("dflash.cli.explain", "explain", "show the page of one failure mode"),
    "env": Command("dflash.cli.env", "env", "show versions, GPUs and what is available"),
}


def help_text() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        "Usage: dflash COMMAND [ARGS]...\n\n"
        "Train, evaluate and export DFlash drafters.\n\n"
        f"Commands:\n{rows}\n\n"
        "Options:\n  --version  print the version\n  --help     print this text\n\n"
        "dflash COMMAND --help says more about one command."
    )


def call(name: str, arguments: Sequence[str]) -> None:
    """Run one command; leaves by ``SystemExit`` as typer does, or by the error it met.

    Raises:
        UsageError: there is no such command.
    """
    first = " ".join([name, *arguments[:1]])
    if first in COMMANDS:  # of two words
        name, arguments = first, arguments[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "--help", "--version"], n=1)
        raise UsageError(
            f"there is no command {name!r}",
            hint=f"did you mean {near[0]}?" if near else "dflash --help lists the commands",
        )
    import typer

    entry = COMMANDS[name]
    thing = getattr(import_module(entry.module), entry.attribute)
    root = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    root.callback()(_no_options)  # makes a group even of one command, so usage says its name
    if isinstance(thing, typer.Typer):
        root.add_typer(thing, name=name, help=entry.help)
    else:
        settings = {"allow_interspersed_args": not entry.runs_a_command}
        root.command(name, context_settings=settings)(thing)
    words = [name, *arguments]
    typer.main.get_command(root)(args=words, prog_name="dflash", obj=words)


def _no_options() -> None:
    pass
