"""Where a rendered conversation is the assistant's: spans of TEXT, found with the chat template.

The conversation is rendered once; nothing is ever tokenised in pieces. A turn begins where the
text of the earlier messages with the generation prompt ends, and goes through the end-of-turn
token. It is supervised only when the text there is what the turn reads as the last turn of its
conversation: a template that rewrites earlier turns (Qwen3 takes their thinking out) has shown the
target something else when it wrote them, so those turns stay unsupervised and are counted.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash.data.rows import Conversation, Message, RowError
from dflash.errors import DataError

_SENTINEL = "dflashsentinel"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the whole conversation through the chat template.
        spans: (start, stop) character ranges that are supervised, in order.
        num_unsupervised_turns: assistant turns that the template rewrites.
    """

    text: str
    spans: list[tuple[int, int]]
    num_unsupervised_turns: int


class ChatTemplate:
    """A tokenizer's chat template, and where assistant turns lie in what it renders.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  # transformers is untyped
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path or '(unnamed)'} has no chat template",
                hint="conversations need one; text and pre-tokenised rows do not",
            )
        self._tokenizer = tokenizer
        template = template_text(tokenizer)
        self.has_generation_tags = _GENERATION_TAG.search(template) is not None
        self._prompt_options: list[dict[str, Any]] = [{}]
        if "enable_thinking" in template:
            self._prompt_options.insert(0, {"enable_thinking": False})
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        self._added = sorted(token for token in added if token.strip())
        self._special_ids = {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def render(self, messages: Sequence[Message], **options: Any) -> str:  # noqa: ANN401  # template variables
        """Return the text of *messages*.

        Raises:
            RowError: the template refused them.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
            )
        except Exception as error:  # a template is a stranger's program
            raise RowError("template_error", f"the chat template failed: {error}") from error

    def generation_prompt(self, messages: Sequence[Message]) -> str:
        """Return the text after which the target writes its answer, thinking switched off."""
        return self.render(messages, add_generation_prompt=True, **self._prompt_options[0])

    def user_prefix(self) -> str:
        """Return the text after which a first user message begins."""
        text = self.render([{"role": "user", "content": _SENTINEL}])
        if text.count(_SENTINEL) != 1:
            raise DataError("the chat template does not show the text of a user message once")
        return text.partition(_SENTINEL)[0]

    def locate(self, conversation: Conversation) -> Rendered:
        """Render a conversation and find its supervised spans.

        Raises:
            RowError: no assistant turn, a template error, or no turn that can be located.
        """
        messages, options = _checked(conversation)
        text = self.render(messages, **options)
        spans: list[tuple[int, int]] = []
        num_turns = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            num_turns += 1
            span = self._turn_span(text, messages[: index + 1], options)
            if span is not None and (not spans or span[0] >= spans[-1][1]):
                spans.append(span)
        if not spans:
            raise RowError("rewritten_turns")
        return Rendered(text, spans, num_turns - len(spans))

    def _turn_span(
        self, text: str, turns: list[Message], options: dict[str, Any]
    ) -> tuple[int, int] | None:
        """Return the span of the last of *turns* in *text*, None when it is not there as written.

        Two facts come from a copy of the turn with a known word as its content: the header that
        precedes any content, and the text that closes the turn.
        """
        alone = self.render(turns, **options)
        probe = self.render([*turns[:-1], {"role": "assistant", "content": _SENTINEL}], **options)
        header, found, closing = probe.rpartition(_SENTINEL)
        if not found or not alone.endswith(closing):
            return None
        prompts = [*self._prompts(turns[:-1], options), header]
        start_alone = _start(alone, prompts)
        start = _start(text, prompts)
        if start_alone is None or start is None:
            return None
        stop = len(alone) - len(closing) + self._end_of_turn(closing)
        answer = alone[start_alone:stop]
        return (start, start + len(answer)) if answer and text.startswith(answer, start) else None

    def _prompts(self, earlier: list[Message], options: dict[str, Any]) -> list[str]:
        prompts = []
        for choice in self._prompt_options:
            try:
                prompts.append(
                    self.render(earlier, add_generation_prompt=True, **{**choice, **options})
                )
            except RowError:  # no earlier message: the header alone must do
                prompts.append("")
        return prompts

    def _end_of_turn(self, closing: str) -> int:
        """Return the length of *closing* through its first added token; else all but its blanks."""
        ends = [(closing.find(t), -len(t)) for t in self._added if t in closing]
        if not ends:
            return len(closing.rstrip())
        at, negative_length = min(ends)
        return at - negative_length

    def tagged_mask(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Tokenise a conversation whose template marks answers with ``{% generation %}``.

        The end-of-turn token right behind a marked answer is supervised too.

        Returns:
            Token ids and loss mask (1 = supervised).
        """
        messages, options = _checked(conversation)
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **options,
            )
        except Exception as error:  # a template is a stranger's program
            raise RowError("template_error", f"the chat template failed: {error}") from error
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        for index in range(1, len(ids)):
            ended = mask[index - 1] and ids[index - 1] not in self._special_ids
            if ended and ids[index] in self._special_ids:
                mask[index] = 1
        return ids, mask


def _checked(conversation: Conversation) -> tuple[list[Message], dict[str, Any]]:
    if not any(message["role"] == "assistant" for message in conversation.messages):
        raise RowError("no_assistant_turn")
    return conversation.messages, {"tools": conversation.tools} if conversation.tools else {}


def _start(text: str, prompts: list[str]) -> int | None:
    """Return where the answer begins in *text*: behind the longest prompt that *text* begins with.

    The last prompt is the header. It decides only when it holds more than blanks beyond the
    others: a template may put a space there that the target itself would write.
    """
    *generation, header = [len(p) if p and text.startswith(p) else -1 for p in prompts]
    start = max(generation)
    if header > start and (start < 0 or text[start:header].strip()):
        start = header
    return start if start >= 0 else None


def template_text(tokenizer: Any) -> str:  # noqa: ANN401  # transformers is untyped
    """Return the source of the tokenizer's chat template, "" without one."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    return template or ""


def tokenizer_hash(tokenizer: Any) -> str:  # noqa: ANN401  # transformers is untyped
    """Return the sha256 of what decides token ids; what only pads or truncates does not count.

    Raises:
        DataError: the tokenizer is a slow one, which knows no offsets.
    """
    require_offsets(tokenizer)
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {k: v for k, v in definition.items() if k not in {"padding", "truncation"}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def require_offsets(tokenizer: Any) -> None:  # noqa: ANN401  # transformers is untyped
    """Raise a DataError unless the tokenizer knows the offsets of its tokens."""
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or '(unnamed)'} gives no token"
            " offsets, without which the loss mask cannot be found",
            hint="use one with a tokenizer.json (a fast tokenizer)",
        )
