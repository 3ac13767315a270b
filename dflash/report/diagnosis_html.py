"""A diagnosis as one self-contained page: no script, nothing to fetch, one file."""

from collections.abc import Iterator
from html import escape

from dflash.diagnose.findings import Diagnosis, Finding
from dflash.environment import gpus_text
from dflash.report.diagnosis import advice_lines, finding_lines, rate_text
from dflash.report.lanes import lanes, memory_curves
from dflash.report.page_style import style

VERDICTS = """
.reproduced { color: var(--bad); font-weight: bold; } .inconclusive { color: var(--warn); }
.not-reproduced { color: var(--good); } .not-applicable { color: var(--dim); }
.verdicts td, .verdicts th { text-align: left; }
"""
HEADINGS = ("failure mode", "verdict", "expected", "faulty", "remedied", "remedy verified")


def diagnosis_html(found: Diagnosis) -> str:
    """The whole page: the table, what to do, then each mode with its timelines and evidence."""
    machine = found.environment
    gpus = gpus_text(machine, [gpu.name for gpu in machine.gpus])
    where = f"torch {found.torch}, {gpus}, {machine.cpu_cores} cores, Python {machine.python}"
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>dflash diagnose: torch {escape(found.torch)}</title>",
        f"<style>{style()}\n{VERDICTS}</style></head><body>",
        "<h1>dflash diagnose</h1>",
        f"<p>{escape(where)}; level {escape(found.level)}, {found.wall_s:.0f} s.</p>",
        *_interrupted(found),
        *_table(found),
    ]
    if found.advice:
        parts += ["<h2>What to do here</h2>", _pre("\n".join(advice_lines(found.advice)))]
    for finding in found.findings:
        parts += _section(finding)
    return "\n".join([*parts, "</body></html>", ""])


def _interrupted(found: Diagnosis) -> Iterator[str]:
    if not found.complete:
        missing = ", ".join(found.missing)
        yield f'<p class="inconclusive">Incomplete: interrupted before {missing}.</p>'


def _table(found: Diagnosis) -> Iterator[str]:
    heads = "".join(f"<th>{name}</th>" for name in HEADINGS)
    yield f'<div class="scroll"><table class="verdicts"><tr>{heads}</tr>'
    for finding in found.findings:
        kind = finding.verdict.replace(" ", "-")
        cells = (
            f'<a href="#{finding.slug}">{finding.slug}</a>',
            f'<span class="{kind}">{finding.verdict}</span>',
            finding.expected,
            _rate(finding, "faulty"),
            _rate(finding, "sound"),
            finding.remedy_verified,
        )
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table></div>"


def _rate(finding: Finding, variant: str) -> str:
    seen = finding.faulty if variant == "faulty" else finding.sound
    return "" if seen is None else f"{seen.shown} of {seen.launches}"


def _section(finding: Finding) -> Iterator[str]:
    yield f'<h2 id="{finding.slug}">{finding.slug}</h2>'
    yield f"<p>{escape(finding.title)}</p>"
    yield _pre("\n".join(finding_lines(finding)))
    if finding.sound is not None:
        told = f"faulty {rate_text(finding.faulty)}; remedied {rate_text(finding.sound)}"
        yield f"<p>{escape(told)}</p>"
    yield from _pictures(finding)
    for launch in finding.launches:
        told = launch.stacks or launch.traceback
        if launch.end != "number" and told:
            label = f"{launch.variant} {launch.seed}: {launch.end}: {launch.message}"
            yield f"<details><summary>{escape(label)}</summary>{_pre(told)}</details>"


def _pictures(finding: Finding) -> Iterator[str]:
    memory = memory_curves(finding.launches, title="memory over the steps")
    if memory:
        yield _figure(memory)
    for launch in finding.launches:
        name = f"{launch.variant} program, launch {launch.seed}"
        picture = lanes(launch, title=name)
        if picture:
            yield f"<h3>{escape(name)}</h3>\n{_figure(picture)}"


def _figure(picture: str) -> str:
    return f'<div class="figure scroll">{picture}</div>'


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
