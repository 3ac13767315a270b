"""What ``dflash generate`` shows while it decodes."""

import pytest

from dflash.cli.generate import Stream


def test_half_a_character_waits_for_its_other_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    def decode(tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(tokens).decode(errors="replace")

    first, second = "é".encode()
    stream = Stream(decode, color=False, bars=False, silent=False)
    stream.block([ord("a"), first], 1)
    assert capsys.readouterr().out == "a"
    stream.block([second, ord("b")], 1)
    assert capsys.readouterr().out == "éb"
    stream.block([first], 0)
    stream.end()
    assert capsys.readouterr().out == "\ufffd\n"


def test_accepted_drafts_are_coloured_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def decode(tokens: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return bytes(tokens).decode()

    stream = Stream(decode, color=True, bars=True, silent=False)
    stream.block(list(b"x"), 0)
    stream.block(list(b"abc"), 2)
    assert capsys.readouterr().out == "x|\033[32mab\033[0mc"
