"""The page of a bench: one whole, self-contained document whose drawings are to scale."""

import re
from html.parser import HTMLParser

import pytest
from bench_samples import failed, measured, sample, turns

from dflash.measurement import Bench, Estimate, Memory, Row
from dflash.report.bars import Bar, bars, reach
from dflash.report.bench_columns import Group, groups
from dflash.report.bench_figures import colours, curve_figure, memory_curves
from dflash.report.bench_html import bench_html
from dflash.report.strips import COLUMNS, ROWS, SCALES, Strip, scale_of, strips
from dflash.report.svg import COLOURS

VOID = {"meta", "rect", "line", "path", "circle", "polyline", "br"}


class Page(HTMLParser):
    """Elements in order, each as (tag, attributes); refuses what is not closed where it must."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str, kind: str | None = None) -> list[dict[str, str]]:
        found = [attrs for name, attrs in self.elements if name == tag]
        return found if kind is None else [each for each in found if each.get("class") == kind]


def bench(*rows: Row) -> Bench:
    cleared = {"rows": list(rows), "comparisons": [], "scaling": []}
    return sample().model_copy(update=cleared)


def colours_and_parts(found: Bench) -> tuple[list[Group], dict[str, int]]:
    parts = groups(found)
    return parts, dict(colours(parts))


def test_the_page_is_whole_and_fetches_nothing() -> None:
    text = bench_html(sample())
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.elements}
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_every_link_leads_somewhere() -> None:
    page = Page(bench_html(sample()))
    links = {attrs["href"].removeprefix("#") for attrs in page.all("a")}
    targets = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(links) == 2
    assert links <= set(targets)
    assert len(targets) == len(set(targets))


def test_what_programs_say_is_escaped() -> None:
    text = bench_html(sample())
    assert "<could not" not in text
    assert "&lt;could not find stack trace&gt; &amp;" in text
    assert "File &quot;&lt;step&gt;&quot;" in text
    assert "&#x27;graphed/eager &gt;= 1.5&#x27;" in text


def test_the_page_names_what_to_heed_what_failed_and_how_to_repeat_it() -> None:
    said = " ".join(" ".join(Page(bench_html(sample())).texts).split())
    for told in (
        "throttled: hardware slowdown",
        "failed: cudagraph-trees",
        "dflash explain cudagraph-trees",
        "skipped: the memory plan says 151.0 GiB",
        "torch 2.11.0+cu130, triton 3.6.0, transformers 5.17.0",
        "to the power 1.14",
        "dflash bench drafter-step --shape made-up-3072",
        '"by_kind_ms"',
        "commit 0123456",
    ):
        assert told in said


@pytest.mark.parametrize("lengths", [["fixed"], ["fixed", "variable"]])
def test_bars_are_as_long_as_their_rates(lengths: list[str]) -> None:
    rows = [measured(mode, each) for each in lengths for mode in ("eager", "graphed")]
    page = Page(bench_html(bench(*rows)))
    drawn = [each for each in page.all("rect") if "style" in each and "class" not in each]
    widths = [float(each["width"].rstrip("%")) for each in drawn[: len(rows)]]
    rates = [row.per_s.value for row in rows if row.per_s is not None]
    fastest = max(row.per_s.high for row in rows if row.per_s is not None)
    assert widths == pytest.approx([100 * rate / fastest for rate in rates], abs=0.01)


def test_an_interval_is_drawn_from_its_low_to_its_high_end() -> None:
    bar = Bar("graphed", 2, value=50.0, low=40.0, high=80.0, tick=90.0, behind=60.0)
    page = Page(bars([bar], top=100.0))
    interval, *_ = page.all("line", "interval")
    assert (interval["x1"], interval["x2"]) == ("40.000%", "80.000%")
    assert page.all("line", "tick")[0]["x1"] == "90.000%"
    assert [each["width"] for each in page.all("rect")] == ["60.000%", "50.000%"]
    assert reach([bar, Bar("other", 0)]) == 90.0


def dots(page: Page, kind: str) -> list[tuple[int, int]]:
    paths = "".join(each["d"] for each in page.all("path", kind))
    return [(int(x), int(y)) for x, y in re.findall(r"M(\d+),(\d+)h0", paths)]


def test_a_strip_has_a_dot_a_step_in_their_order() -> None:
    strip = Strip("m", 0, first_ms=[900.0, 100.0], turns_ms=[[100, 102], [98, 110]], median_ms=100)
    page = Page(strips([strip], scale=0.05))
    timed, beyond, untimed = (dots(page, kind) for kind in ("timed", "beyond", "untimed"))
    middle = ROWS // 2
    assert [y for _, y in timed] == [middle, middle - 20, middle + 20]  # up is slower
    assert [y for _, y in beyond] == [0]
    assert [y for _, y in untimed] == [0, middle]
    xs = [x for x, _ in [*untimed, *timed, *beyond]]
    assert xs == sorted(xs)
    assert xs[-1] <= COLUMNS
    assert len(page.all("rect", "turn")) == 1


def test_a_long_run_is_drawn_in_a_bounded_page() -> None:
    row = measured("eager", turns_ms=turns(7.0, seed=1, num_turns=1000, steps=100))
    assert len(bench_html(bench(row))) < 400_000


@pytest.mark.parametrize("unrest", [0.0, 0.009, 0.01, 0.0101, 0.2, 3.0])
def test_the_scale_of_strips_holds_twice_the_unrest(unrest: float) -> None:
    scale = scale_of(unrest)
    assert scale in SCALES
    assert scale >= 2 * unrest or scale == SCALES[-1]


def test_a_mode_keeps_its_colour_in_every_figure() -> None:
    rows = [failed(), measured("eager"), measured("graphed")]
    text = bench_html(bench(*rows))
    graphed = '<span class="name">graphed</span>'
    pieces = text.split(graphed)[1:]
    assert len(pieces) >= 3  # speed, strip, memory
    assert {re.findall(r"--c(\d)", piece)[0] for piece in pieces} == {"2"}


def test_rows_with_next_to_nothing_still_make_a_page() -> None:
    bare = Row(case="mask", shape="tiny", mode="launched", state="measured", unit="mask")
    host = measured("eager", memory=Memory(rss_gib=1.5), per_s=Estimate(value=0, low=0, high=0))
    bench_empty = bench().model_copy(update={"weather": None, "commit": None})
    for some in (bench(bare), bench(host), bench_empty, bench(failed())):
        Page(bench_html(some))
    on_cpu = bench_html(bench(host, failed()))
    assert "host 1.50" in on_cpu
    assert "resident on the host" in on_cpu
    assert "reserved" not in on_cpu
    assert on_cpu.count('class="name">reduce-overhead') == 1  # in the bars of speed only


def test_memory_over_steps_has_the_modes_colours_and_one_scale_for_all_lengths() -> None:
    rows = [failed(), *(measured("eager", lengths) for lengths in ("fixed", "variable"))]
    parts = colours_and_parts(bench(*rows))
    reserved, allocated = (piece for piece in memory_curves(*parts) if "<svg" in piece)
    for figure in (reserved, allocated):
        assert set(re.findall(r'<polyline [^>]*stroke="(#\w+)"', figure)) == {COLOURS[1]}
        assert figure.count(">30</text>") == 2  # the variable lengths' peak rounds up to it


def test_the_figures_behind_a_curve_are_a_click_away() -> None:
    folded = bench_html(sample()).split("<summary>all figures of every value</summary>")[1]
    folded = folded.split("</details>")[0]
    assert [f"made-up-{budget}, fixed" in folded for budget in (8192, 16384, 3072)] == [1, 1, 0]
    assert folded.count(">start-up s<") == 3


def test_step_time_and_memory_of_a_curve_share_their_horizontal_axis() -> None:
    (curve,) = sample().scaling
    labels = re.findall(r'text-anchor="middle"[^>]*>(\d+000)</text>', curve_figure(curve))
    assert labels[: len(labels) // 2] == labels[len(labels) // 2 :]
    assert labels[-1] == "50000"
