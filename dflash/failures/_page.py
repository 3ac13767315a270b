"""A failure mode's page: the docstring of its file, taken apart."""

import inspect
import re
import sys
from dataclasses import dataclass

from dflash.failures._mode import HEADINGS, FailureMode


@dataclass(frozen=True, slots=True)
class Page:
    """The failure as a sentence, and the text under each heading, dedented."""

    title: str
    sections: dict[str, str]


def page_of(mode: FailureMode) -> Page:
    """The page of *mode*, out of the file that defines its ``reproduce``."""
    module = sys.modules[mode.reproduce.__module__]
    return read_page(module.__doc__ or "")


def read_page(docstring: str) -> Page:
    """Take a page apart. What stands before a first heading, the title aside, is left out."""
    text = inspect.cleandoc(docstring)
    title = " ".join(text.split("\n\n")[0].split("\n")).strip()
    headings = re.compile(rf"^({'|'.join(HEADINGS)})$", re.MULTILINE)
    parts = headings.split(text)
    bodies = (inspect.cleandoc(f"\n{body}") for body in parts[2::2])
    return Page(title, dict(zip(parts[1::2], bodies, strict=True)))
