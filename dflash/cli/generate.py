"""``dflash generate``: text as it is decoded, with the accepted blocks shown."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli.eval import warn_of_another_target
from dflash.cli.options import (
    DEFAULT_NEW_TOKENS,
    AsJson,
    DeviceName,
    MaxNewTokens,
    RemoteCode,
    Seed,
    StoredPath,
    TargetPath,
    Temperature,
)
from dflash.cli.output import print_json, talk
from dflash.errors import UsageError

if TYPE_CHECKING:
    from dflash.decode import Decoded

GREEN, PLAIN = "\033[32m", "\033[0m"
UNFINISHED = "\ufffd"  # how a tokenizer shows the first bytes of a character that goes on


def generate(  # noqa: PLR0913  one option each
    drafter: StoredPath,
    *,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="text to go on with as it stands")
    ] = None,
    chat: Annotated[
        str | None, typer.Option(metavar="TEXT", help="a user's message, by the chat template")
    ] = None,
    show_blocks: Annotated[
        bool, typer.Option("--show-blocks", help="put | between the blocks of verify steps")
    ] = False,
    max_new_tokens: MaxNewTokens = DEFAULT_NEW_TOKENS,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    target: TargetPath = None,
    device: DeviceName = "auto",
    trust_remote_code: RemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Stream text. On a terminal, accepted drafts are green and the target's own tokens plain."""
    if (prompt is None) == (chat is None):
        raise UsageError("give either --prompt or --chat")
    import torch

    from dflash.decode import DecodeLimits, answer_room, speculative_decode
    from dflash.train.pair import load_pair

    pair = load_pair(drafter, target=target, device=device, trust_remote_code=trust_remote_code)
    warn_of_another_target(pair)
    tokenizer = pair.target.tokenizer
    prompt_ids = _prompt_ids(tokenizer, prompt, chat)
    room = answer_room(pair.target.model.config, len(prompt_ids))
    if room is not None and room < max_new_tokens:
        talk(f"note: stops after {room} tokens at the latest, where the target's positions end")
        max_new_tokens = room
    limits = DecodeLimits(
        max_new_tokens=max_new_tokens, temperature=temperature, stop_ids=pair.target.stop_ids
    )
    stream = Stream(tokenizer.decode, color=sys.stdout.isatty(), bars=show_blocks, silent=as_json)
    decoded = speculative_decode(
        pair.target,
        pair.drafter,
        prompt_ids,
        limits=limits,
        generator=torch.Generator(pair.target.device).manual_seed(seed),
        on_block=stream.block,
    )
    stream.end()
    if as_json:
        print_json(_report(decoded, tokenizer.decode(decoded.tokens, skip_special_tokens=True)))
    talk(_figures(decoded))


class Stream:
    """Prints committed blocks as text; a character is printed when its last byte is there."""

    def __init__(
        self, decode: Callable[..., str], *, color: bool, bars: bool, silent: bool
    ) -> None:
        self._decode = decode
        self._color, self._bars, self._silent = color, bars, silent
        self._tokens: list[int] = []
        self._text = ""

    def block(self, tokens: list[int], num_drafts: int) -> None:
        """One verify step: its first *num_drafts* tokens were drafted, the rest is the target's."""
        if self._bars and self._tokens:
            self._print("|")
        drafted = self._text_of(tokens[:num_drafts])
        if drafted:
            self._print(f"{GREEN}{drafted}{PLAIN}" if self._color else drafted)
        self._print(self._text_of(tokens[num_drafts:]))

    def end(self) -> None:
        """Print what is left of an unfinished character, and the line's end."""
        self._print(self._shown()[len(self._text) :] + "\n")

    def _text_of(self, tokens: list[int]) -> str:
        self._tokens += tokens
        shown = self._shown()
        if shown.endswith(UNFINISHED):
            return ""
        new, self._text = shown[len(self._text) :], shown
        return new

    def _shown(self) -> str:
        return self._decode(self._tokens, skip_special_tokens=True)

    def _print(self, text: str) -> None:
        if not self._silent:
            print(text, end="", flush=True)


def _prompt_ids(tokenizer: Any, prompt: str | None, chat: str | None) -> list[int]:  # noqa: ANN401
    from dflash.data.prompt_files import chat_prompt, text_prompt

    if chat is not None:
        return chat_prompt(tokenizer, [{"role": "user", "content": chat}])
    return text_prompt(tokenizer, prompt or "")


def _figures(decoded: "Decoded") -> str:
    tau = "no verify step" if decoded.tau is None else f"tau {decoded.tau:.2f}"
    speed = decoded.num_decoded / decoded.decode_s if decoded.num_decoded else 0.0
    return (
        f"{len(decoded.tokens)} tokens in {len(decoded.accepted)} verify steps: "
        f"{tau}, {speed:.1f} tok/s, {decoded.decode_loop} loop"
    )


def _report(decoded: "Decoded", text: str) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": decoded.tokens,
        "accepted": decoded.accepted,
        "tau": decoded.tau,
        "prefill_s": decoded.prefill_s,
        "decode_s": decoded.decode_s,
        "finished_by": decoded.finished_by,
        "decode_loop": decoded.decode_loop,
        "eager_because": decoded.eager_because,
    }
