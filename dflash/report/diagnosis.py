"""A diagnosis as lines of at most 78 columns; ``style_of`` says which of them stand out."""

import shlex
import textwrap
import tomllib
from collections.abc import Iterator

from dflash.config import toml_value
from dflash.diagnose.findings import (
    Advice,
    Diagnosis,
    Finding,
    Launch,
    Rate,
    RunDiagnosis,
    Suffered,
    WatchDiagnosis,
)
from dflash.report.layout import command_lines, title_lines

WIDTH = 78
INDENT = "  "
LABEL_WIDTH = 10
SIGNS = {
    "reproduced": "!!",
    "not reproduced": "ok",
    "not applicable": "--",
    "inconclusive": "??",
}
STYLES = {"!!": "bold red", "ok": "green", "--": "dim", "??": "yellow"}


def finding_lines(finding: Finding) -> list[str]:
    """Verdict first; then what it rests on, what was expected, the remedy, the evidence."""
    head = f"{SIGNS[finding.verdict]} {finding.slug}: {finding.verdict}"
    rows = [("what", finding.title), ("verdict", _verdict(finding))]
    rows.append(("expected", f"{finding.expected}: {finding.expected_why}"))
    if finding.not_run and finding.part is not None:
        rows.append(("not run", finding.not_run))
    if finding.part is not None:
        rows.append(("number", _numbers(finding)))
        rows.append(("remedy", f"{finding.remedy}; verified here: {finding.remedy_verified}"))
        rows.append(("", finding.remedy_why))
    rows += [("evidence", text) for text in evidence(finding)]
    return [head, *(line for label, text in rows for line in _row(label, text))]


def matrix_lines(diagnosis: Diagnosis) -> list[str]:
    """A line a failure mode: verdict, what was expected, whether the remedy was verified."""
    width = max((len(finding.slug) for finding in diagnosis.findings), default=4)
    lines = []
    for finding in diagnosis.findings:
        verified = "" if finding.part is None else f"remedy {finding.remedy_verified}"
        sign = SIGNS[finding.verdict]
        row = f"{sign} {finding.slug:<{width}}  {finding.verdict:<14}  {_surprise(finding):<11}"
        lines.append(f"{row}  {verified}".rstrip())
    return lines


def advice_lines(advice: Advice) -> list[str]:
    """Every execution mode; the advice as a command and as keys; last what to do, in a sentence."""
    lines = []
    for each in advice.modes:
        lines += _row(each.mode, f"{each.safe}: {each.why}", label_width=16)
    words = ["dflash", "train", "CONFIG", *_overrides(advice)]
    lines += ["", "train so, whatever CONFIG says (dflash config check takes the same words):"]
    lines += command_lines(shlex.join(words))
    lines += ["or set these keys in CONFIG, each in the section of that name:"]
    lines += [f"{INDENT}{line}" for line in advice.config.splitlines()]
    return [*lines, "", *title_lines(f"{advice.sentence}: {advice.why}")]


def _overrides(advice: Advice) -> list[str]:
    """The keys of the advice as the words that ``dflash train`` takes behind the configuration;
    without spaces, so that the devices of eight GPUs fit a line."""
    return [
        f"{table}.{key}={toml_value(value).replace(', ', ',')}"
        for table, keys in tomllib.loads(advice.config).items()
        for key, value in keys.items()
    ]


def launch_line(slug: str, launch: Launch) -> str:
    """What a launch came to, as talk while others still run."""
    came_to = f"{launch.value:g}" if launch.end == "number" else f"{launch.end}: {launch.message}"
    text = f"{slug} {launch.variant} {launch.seed}: {came_to} ({launch.wall_s:.1f} s)"
    return textwrap.shorten(text, WIDTH, placeholder=" ..")


def evidence(finding: Finding) -> Iterator[str]:
    """The exceptions, signals and hangs that the faulty launches ended in, each once."""
    told = dict.fromkeys(
        f"{launch.end}{f' in {launch.thread}' if launch.thread else ''}: {_first(launch.message)}"
        for launch in finding.launches
        if launch.end != "number" and launch.variant in ("faulty", "control")
    )
    yield from list(told)[:3]


def run_lines(diagnosis: RunDiagnosis) -> list[str]:
    """What a finished run suffered from, with the lines that show it."""
    lines = [line for found in diagnosis.suffered for line in _suffered_lines(found)]
    if not diagnosis.suffered:
        sign, found = ("??", "no failure mode") if diagnosis.notes else ("ok", "nothing")
        lines.append(f"{sign} {diagnosis.run_dir}: {found} found")
    for note in diagnosis.notes:
        lines += _row("note", note)
    return lines


def watch_lines(diagnosis: WatchDiagnosis) -> list[str]:
    """How a watched program ended, what it suffered from, and what was not seen of it."""
    program = textwrap.shorten(" ".join(diagnosis.command), 40, placeholder=" ..")
    ended = f"exit code {diagnosis.exit_code}"
    if diagnosis.exit_code is None:
        ended = f"ended by {diagnosis.signal}"
    head = f"watched {program}: {ended} after {diagnosis.wall_s:.1f} s"
    lines = textwrap.wrap(head, WIDTH, subsequent_indent=INDENT)
    for found in diagnosis.suffered:
        lines += [*_suffered_lines(found), *_row("more", f"dflash explain {found.slug}")]
    if not diagnosis.suffered:
        lines += textwrap.wrap(_unseen(diagnosis), WIDTH, subsequent_indent=INDENT)
    for note in diagnosis.notes:
        lines += _row("note", note)
    return lines


def _unseen(diagnosis: WatchDiagnosis) -> str:
    """That no failure mode was seen, which of a program that did not end well says little."""
    if diagnosis.undiagnosed:
        return f"?? nothing could be diagnosed, since {diagnosis.undiagnosed}"
    but = ""
    if diagnosis.ended_for_stall:
        but = "it stood still and was ended"
    elif diagnosis.exit_code is None:
        but = f"it died of {diagnosis.signal}"
    elif diagnosis.exit_code:
        but = f"its exit code is {diagnosis.exit_code}"
    elif diagnosis.stalls:
        but = "it stood still for a while"
    elif diagnosis.died:
        but = f"an exception ended thread {diagnosis.died[0]}"
    return f"?? no failure mode was seen, but {but}" if but else "ok no failure mode was seen"


def _suffered_lines(found: Suffered) -> list[str]:
    lines = [f"!! {found.slug}", *_row("what", found.title)]
    for number, text in enumerate(found.evidence):
        lines += _row("" if number else "evidence", text)
    return [*lines, *_row("remedy", found.remedy)] if found.remedy else lines


def style_of(line: str) -> str:
    """How rich draws *line*."""
    return STYLES.get(line[:2], "")


def rate_text(seen: Rate | None) -> str:
    if seen is None:
        return "not run"
    if seen.launches == 1:
        return f"{seen.shown} of 1"
    return f"{seen.shown} of {seen.launches} (95 %: {seen.at_least:.1%} to {seen.at_most:.1%})"


def _verdict(finding: Finding) -> str:
    if finding.faulty is None:
        return f"{finding.verdict}: {finding.why}"
    once = "; one launch decides" if finding.deterministic and finding.faulty.launches == 1 else ""
    if finding.verdict == "inconclusive":
        return f"{finding.verdict}: {finding.why}"
    return f"{finding.verdict}: {rate_text(finding.faulty)}{once}"


def _surprise(finding: Finding) -> str:
    if finding.verdict not in ("reproduced", "not reproduced"):
        return ""
    if finding.expected == "not known":
        return "not known"
    return "as expected" if finding.verdict == finding.expected else "unexpected"


def _numbers(finding: Finding) -> str:
    faulty = "none" if finding.worst is None else f"{finding.worst:g}"
    sound = "none" if finding.best is None else f"{finding.best:g}"
    unit = f" {finding.unit}".rstrip() if not finding.unit.startswith("1") else ""
    return (
        f"{finding.measures}: {faulty}{unit} faulty, {sound}{unit} remedied, limit"
        f" {finding.limit:g}{unit}"
    )


def _row(label: str, text: str, *, label_width: int = LABEL_WIDTH) -> list[str]:
    before = f"{INDENT}{label:<{label_width}}"
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=before,
        subsequent_indent=" " * len(before),
        break_on_hyphens=False,
    ) or ([before.rstrip()] if label else [])


def _first(message: str) -> str:
    """The first line of a message, which may be as long as a page."""
    return textwrap.shorten(message.splitlines()[0], 240, placeholder=" ..") if message else ""
