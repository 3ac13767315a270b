"""Text from outside reaches files, terminals and reports without harm."""

import json
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest
from pydantic import BaseModel, model_validator

from dflash.readable import readable, readable_facts, signal_name, signal_number


class Told(BaseModel):
    _readable = model_validator(mode="before")(readable_facts)

    text: str = ""
    words: list[str] = []
    facts: dict[str, Any] = {}
    inner: "Told | None" = None


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain\n\ttext, Zürich, 日本, 🙂", "plain\n\ttext, Zürich, 日本, 🙂"),
        ("\x1b[31mbad\x1b[0m shape", "bad shape"),
        ("caf\udce9.txt", "caf\\udce9.txt"),
        ("a\x00b\x07c\x1b]0;title\x07", "a\\x00b\\x07c\\x1b]0;title\\x07"),
        ("10 %\r20 %\r\n30 %", "10 %\n20 %\n30 %"),
        ("\x85\ufffe", "\\x85\\ufffe"),
    ],
)
def test_what_cannot_be_held_or_obeyed_is_shown_as_an_escape(given: str, shown: str) -> None:
    assert readable(given) == shown


def test_every_text_of_a_model_is_readable_however_deep() -> None:
    told = Told(
        text="\udcff",
        words=["a", "\x1b[1mb"],
        facts={"\x00": ["\udc80", {"n": 1.5}]},
        inner=Told(text="\x07"),
    )
    assert json.loads(told.model_dump_json()) == {
        "text": "\\udcff",
        "words": ["a", "b"],
        "facts": {"\\x00": ["\\udc80", {"n": 1.5}]},
        "inner": {"text": "\\x07", "words": [], "facts": {}, "inner": None},
    }


def test_no_character_at_all_keeps_a_text_out_of_json_or_xml() -> None:
    every = "".join(map(chr, range(0x110000)))
    text = readable(every)
    assert text.encode()
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    assert len(fromstring(f"<a>{escaped}</a>").text or "") == len(text)  # noqa: S314 - our own


@pytest.mark.parametrize(("number", "name"), [(11, "SIGSEGV"), (9, "SIGKILL"), (35, "signal 35")])
def test_a_signal_has_a_name_a_real_time_one_too(number: int, name: str) -> None:
    assert signal_name(number) == name
    assert signal_number(name) == number
