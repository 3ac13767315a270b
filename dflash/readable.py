"""Text from outside, as every file, terminal and report can hold it.

Arguments, paths and error texts of other people's programs may hold control codes and bytes that
are no UTF-8 (Python keeps these as lone surrogates). One such character would otherwise lose a
report: JSON and UTF-8 refuse surrogates, XML 1.0 refuses control characters, and a terminal obeys
them.
"""

import re
import signal
from typing import Any

_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # ECMA-48, section 5.4: control sequences
_LINE_ENDS = re.compile(r"\r+\n?")
_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def readable(text: str) -> str:
    """*text* without colours, with other control characters and lone surrogates as escapes.

    Newlines and tabs stay; a carriage return, by which progress bars begin a line anew, becomes a
    newline.
    """
    text = _LINE_ENDS.sub("\n", _COLOURS.sub("", text))
    return _UNREADABLE.sub(lambda found: _escape(ord(found[0])), text)


def signal_name(number: int) -> str:
    """``SIGSEGV``; of a real-time signal, which has no name of its own, ``signal 35``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_number(name: str) -> int:
    """The number of what ``signal_name`` called *name*."""
    known = signal.Signals.__members__.get(name)
    return int(name.rpartition(" ")[2]) if known is None else known.value


def readable_facts(cls: type, facts: Any) -> Any:  # noqa: ANN401, ARG001 - whatever a model gets
    """A model's validator, ``mode="before"``: all text readable, in lists and dictionaries too."""
    return _readable(facts)


def _readable(value: Any) -> Any:  # noqa: ANN401 - any JSON value, or models
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {_readable(name): _readable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(inner) for inner in value]
    return value


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"  # noqa: PLR2004
