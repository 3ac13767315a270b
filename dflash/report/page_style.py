"""How the pages of a bench and of a diagnosis look: light or dark as the reader's system asks."""

from dflash.report.svg import COLOURS, GREY

DARK = ("#5aa9ea", "#f08a5b", "#6cc582", "#b292dc", "#d3b650", "#8fa3b8")  # of COLOURS, in order

LAYOUT = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 880px; margin: 2em auto; padding: 0 1em; }
h1 { margin-bottom: 0; }
h2 { margin-top: 2em; border-top: 2px solid var(--line); padding-top: 1em; }
h3 { margin: 1.6em 0 .3em; } h4 { margin: 1em 0 .2em; font-weight: 600; }
p.note, .legend { color: var(--dim); margin: .2em 0 .6em; }
a { color: var(--c0); } a.bad { color: var(--bad); }
ul.said { list-style: none; padding: 0; } ul.said li { padding: 2px 10px; margin: 4px 0;
  border-left: 4px solid var(--line); overflow-wrap: anywhere; }
ul.said li.bad { border-color: var(--bad); } ul.said li.warn { border-color: var(--warn); }
.bad b, span.bad, span.slower, span.worse { color: var(--bad); font-weight: 600; }
span.unclear { color: var(--warn); font-weight: 600; }
span.faster, span.better { color: var(--good); font-weight: 600; }
.instead, .dim { color: var(--dim); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6em 0; }
td, th { text-align: right; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.facts td:first-child { white-space: nowrap; vertical-align: top; }
pre { background: var(--soft); padding: 10px; overflow-x: auto; font-size: 13px; }
summary { cursor: pointer; }
.bar { display: grid; grid-template-columns: 9.5em 1fr 17em; gap: 10px; align-items: center; }
.bar .instead { grid-column: 2 / 4; }
.bar .track { background: var(--soft); display: block; }
.value { font-variant-numeric: tabular-nums; }
.behind { opacity: .35; } .interval, .tick { stroke: var(--ink); stroke-width: 1.5; }
.tick { stroke-dasharray: 3 2; }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 12px;
       background: var(--c0); vertical-align: -1px; }
.key.pale { opacity: .35; } .key.mark { width: 0; background: none; border-left: 2px dashed; }
.strip .above { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px; }
.strip .plot { position: relative; background: var(--soft); margin: 5px 0 9px; }
.strip svg { display: block; width: 100%; height: 64px; overflow: visible; }
.strip path { fill: none; stroke-width: 2.6; stroke-linecap: round;
              vector-effect: non-scaling-stroke; }
.strip .untimed { stroke: var(--warn); stroke-width: 4; } .strip .beyond { stroke: var(--bad);
  stroke-width: 5; }
.strip .middle { stroke: var(--dim); stroke-width: .7; } .strip .before { fill: var(--line); }
.strip .turn { fill: var(--line); opacity: .45; }
.strip .high, .strip .low { position: absolute; right: 3px; font-size: 11px; color: var(--dim); }
.strip .high { top: 0; } .strip .low { bottom: 0; }
.figure svg { min-width: 560px; max-width: 100%; height: auto; display: block; }
@media (max-width: 640px) { .bar { grid-template-columns: 1fr auto; gap: 0 10px; margin: 6px 0; }
  .bar .track { grid-column: 1 / 3; grid-row: 2; } .bar .instead { grid-column: 1 / 3; } }
@media print { body { max-width: none; } }
"""
LIGHT_NAMES = {
    "paper": "#ffffff",
    "ink": "#222233",
    "dim": "#5c6070",
    "line": "#dde0ea",
    "soft": "#f3f4f8",
    "bad": "#b3261e",
    "warn": "#8a6100",
    "good": "#22723a",
}
DARK_NAMES = {
    "paper": "#15171c",
    "ink": "#e5e7ec",
    "dim": "#a2a8b6",
    "line": "#343a47",
    "soft": "#1f232b",
    "bad": "#ff8a80",
    "warn": "#e6b450",
    "good": "#7bd08f",
}
DRAWN = {"white": "paper", "#223": "ink", GREY: "dim", "#dde": "line"}  # as svg.figure writes them


def style() -> str:
    """The style sheet of the page."""
    light = LIGHT_NAMES | {f"c{number}": colour for number, colour in enumerate(COLOURS)}
    dark = DARK_NAMES | {f"c{number}": colour for number, colour in enumerate(DARK)}
    in_figures = DRAWN | {colour: f"c{number}" for number, colour in enumerate(COLOURS)}
    rules = [
        f'.figure [{kind}="{colour}"] {{ {kind}: var(--{name}); }}'
        for colour, name in in_figures.items()
        for kind in ("fill", "stroke")
    ]
    return "\n".join(
        [
            f":root {{ color-scheme: light dark; {_variables(light)} }}",
            f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(dark)} }} }}",
            LAYOUT.strip(),
            *rules,
        ]
    )


def _variables(values: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in values.items())
