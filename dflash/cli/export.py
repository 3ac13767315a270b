"""``dflash export``: a folder that serving engines load, verified before the command succeeds."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dflash.cli.interrupts import sigterm_is_ctrl_c
from dflash.cli.options import AsJson, RemoteCode, StoredPath, TargetPath
from dflash.cli.output import check_folder, print_json, talk
from dflash.errors import UsageError


class Layout(StrEnum):
    """Whose format."""

    ZLAB = "z-lab"
    SPECULATORS = "speculators"


def export(
    drafter: StoredPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="new or empty folder")],
    *,
    to: Annotated[Layout, typer.Option(help="z-lab: vLLM, SGLang, transformers")] = Layout.ZLAB,
    target: TargetPath = None,
    trust_remote_code: RemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Write a drafter as other software loads it, in bf16, with a model card."""
    check_folder(out, replaced=True)
    if to is Layout.ZLAB and (target is not None or trust_remote_code):
        option = "--trust-remote-code" if target is None else "--target"
        raise UsageError(
            f"{option} belongs to --to speculators: the z-lab layout holds nothing of a target",
            hint="leave it out",
        )
    from dflash.train.export import export_speculators, export_zlab, require_new
    from dflash.train.stored import open_checkpoint

    require_new(out)
    with sigterm_is_ctrl_c():
        if to is Layout.ZLAB:
            stored = open_checkpoint(drafter)
            export_zlab(stored, out)
        else:
            from dflash.cli.eval import warn_of_another_target
            from dflash.train.pair import load_pair

            trust = trust_remote_code
            pair = load_pair(drafter, target=target, device="cpu", trust_remote_code=trust)
            warn_of_another_target(pair)
            stored = pair.stored
            export_speculators(stored, out, target=pair.target, name=pair.target_source)
    step = "" if stored.step is None else f", step {stored.step}"
    talk(f"wrote {out} ({to.value}{step}): read back and equal")
    if as_json:
        print_json(
            {
                "path": str(out),
                "layout": to.value,
                "checkpoint": str(stored.path),
                "step": stored.step,
                "files": sorted(file.name for file in out.iterdir()),
            }
        )
