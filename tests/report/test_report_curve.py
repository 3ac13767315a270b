"""The learning curve is a well-formed picture of what the records hold."""

import math
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from dflash.records import EvalRecord, EventRecord, RecordWriter, StepRecord
from dflash.report.curve import learning_curve, write_learning_curve
from dflash.report.svg import Axis, ticks

SVG = "{http://www.w3.org/2000/svg}"


def step(number: int, *, loss: float, accepted: float | None = None) -> StepRecord:
    return StepRecord(
        step=number, loss=loss, lr=1e-3, grad_norm=1.0, accepted_tokens_per_block=accepted
    )


def evaluation(number: int, tau: float) -> EvalRecord:
    return EvalRecord(
        step=number, tau=tau, tau_per_prompt=[tau], accepted_per_position=[0.5],
        tokens_per_s_drafter=1.0, num_prompts=1, max_new_tokens=8,
    )  # fmt: skip


def draw(*records: StepRecord | EvalRecord | EventRecord, title: str = "run") -> ET.Element:
    return ET.fromstring(learning_curve(records, title=title))  # noqa: S314 - our own text


def texts(root: ET.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def lines(root: ET.Element) -> list[list[tuple[float, float]]]:
    return [
        [
            (float(x), float(y))
            for x, y in (pair.split(",") for pair in node.attrib["points"].split())
        ]
        for node in root.iter(f"{SVG}polyline")
    ]


def test_loss_accepted_length_and_tau_are_drawn_with_labelled_axes() -> None:
    root = draw(
        step(10, loss=4.0, accepted=1.0),
        EventRecord(step=10, name="checkpoint"),
        step(20, loss=2.0, accepted=2.0),
        evaluation(20, 2.25),
    )
    loss, tau, accepted = lines(root)
    assert (len(loss), len(tau), len(accepted)) == (2, 1, 2)
    assert loss[0][1] < loss[1][1]  # pixels grow downwards: the loss falls
    assert accepted[0][1] > accepted[1][1]
    said = texts(root)
    assert said.count("optimizer steps") == 2
    assert {"loss (nat)", "tokens", "training loss", "2.25"} <= set(said)
    assert len(list(root.iter(f"{SVG}circle"))) == 1


def test_everything_drawn_lies_inside_the_picture() -> None:
    root = draw(*(step(n, loss=math.exp(-n) * 1e4, accepted=1 + n) for n in range(1, 9)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in lines(root):
        for x, y in line:
            assert 0 < x < width
            assert 0 < y < height


def test_a_title_cannot_break_the_picture() -> None:
    assert "a <b> & 'c'" in texts(draw(step(1, loss=1.0), title="a <b> & 'c'"))


def test_what_was_not_recorded_is_said_not_drawn() -> None:
    said = texts(draw())
    assert "loss (nat): nothing recorded" in said
    assert "tokens: nothing recorded" in said


def test_a_loss_that_is_not_a_number_leaves_a_gap() -> None:
    root = draw(step(1, loss=2.0), step(2, loss=math.nan), step(3, loss=math.inf), step(4, loss=1))
    assert [len(line) for line in lines(root)] == [2]


def test_a_single_point_has_axes() -> None:
    assert len(lines(draw(step(5, loss=3.0)))) == 1


def test_crowded_tau_labels_are_thinned_and_the_last_is_kept() -> None:
    said = texts(draw(*(evaluation(n, 1 + n / 1000) for n in range(0, 1001, 10))))
    assert "2.00" in said
    assert sum(len(text) == 4 and text.startswith("1.") for text in said) < 30


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (1, 2.6, [1, 1.5, 2, 2.5, 3]),
        (0.001, 0.0049, [0.001, 0.002, 0.003, 0.004, 0.005]),
        (3, 3, [2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (1e6, 3e6, [1e6, 1.5e6, 2e6, 2.5e6, 3e6]),
    ],
)
def test_ticks_are_round_and_enclose_the_data(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == expected


def test_an_axis_maps_its_ends_to_its_ends() -> None:
    axis = Axis(2.0, 4.0, 100.0, 0.0)
    assert [axis(2), axis(3), axis(4)] == [100.0, 50.0, 0.0]


def test_a_run_folder_is_drawn_into_a_file(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        writer.write(step(1, loss=2.0))
    out = tmp_path / "curve.svg"
    write_learning_curve(tmp_path, out, title="mine")
    assert "mine" in texts(ET.fromstring(out.read_text()))  # noqa: S314 - our own text
    assert {path.name for path in tmp_path.iterdir()} == {"records.jsonl", "curve.svg"}
