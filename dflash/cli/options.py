"""Options that several commands share, so that they read and mean the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

from dflash.errors import UsageError

DEFAULT_NEW_TOKENS = 256

StoredPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|CHECKPOINT",
        help="checkpoint or z-lab folder; of a run the checkpoint with the longest measured tau,"
        " the earliest if equal, else the newest",
    ),
]
TargetPath = Annotated[
    str | None,
    typer.Option("--target", metavar="PATH", help="target other than the checkpoint names"),
]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu or cuda:N")]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run code that the target brings along")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", min=1, help="length of an answer, in tokens")
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="of sampling")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON value on stdout")]


def _is_named(out: str | None) -> str | None:
    if out == "":
        raise UsageError("--json is empty", hint="name a file; - is stdout")
    return out


JsonOut = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="write JSON; - is stdout", callback=_is_named),
]
