"""``dflash explain``: the page of one failure mode, as the docs site shows it."""

from typing import Annotated

import typer

from dflash.cli.options import AsJson
from dflash.cli.output import print_json, print_lines


def explain(
    slug: Annotated[str, typer.Argument(metavar="SLUG", help="dflash diagnose lists them")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show symptom, mechanism, remedy, the number that decides, versions and sources."""
    from dflash.diagnose.examine import remedy_name
    from dflash.diagnose.machine import installed_torch
    from dflash.diagnose.select import mode_called, require_slugs
    from dflash.failures import page_of

    require_slugs([slug])
    installed_torch()
    mode = mode_called(slug)
    page = page_of(mode)
    if as_json:
        facts = {
            "slug": mode.slug,
            "title": page.title,
            "measures": mode.measures,
            "unit": mode.unit,
            "limit": mode.limit,
            "device": mode.device,
            "affected": dict(mode.affected),
            "remedy": remedy_name(mode),
            "sections": {name.lower(): text for name, text in page.sections.items()},
        }
        print_json(facts)
        return
    lines = [f"{mode.slug}: {page.title}"]
    for name, text in page.sections.items():
        lines += ["", name, *(f"    {line}".rstrip() for line in text.splitlines())]
    print_lines(lines, lambda line: "bold" if line and not line.startswith(" ") else "")
