"""Which tokens of a conversation are supervised, said as the text that they decode to."""

from itertools import groupby
from typing import Any

import chat_templates as shapes
import pytest
from chat_templates import MakeTokenizer
from transformers import PreTrainedTokenizerFast

from dflash.data.encode import EncodedRow, Encoder
from dflash.data.rows import Conversation, Dropped, RawRow
from dflash.errors import DataError

TURNS = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "I am well.\n\nThank you."},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def encode(
    tokenizer: PreTrainedTokenizerFast, messages: list[Any], *, limit: int = 4096
) -> EncodedRow | Dropped:
    encoder = Encoder(tokenizer, len(tokenizer), limit)
    (row,) = encoder.encode([RawRow(0, 1, Conversation(messages))])
    return row


def supervised_texts(tokenizer: PreTrainedTokenizerFast, messages: list[Any]) -> list[str]:
    """Decode each run of supervised tokens."""
    row = encode(tokenizer, messages)
    assert isinstance(row, EncodedRow), row
    pairs = zip(row.loss_mask.tolist(), row.tokens.tolist(), strict=True)
    runs = [(bit, [token for _, token in run]) for bit, run in groupby(pairs, lambda p: p[0])]
    return [tokenizer.decode(ids) for bit, ids in runs if bit]


ANSWERS = ("Hi there.", "I am well.\n\nThank you.")


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        (shapes.CHATML, "<|im_end|>", ""),
        (shapes.CHATML_DEFAULT_SYSTEM, "<|im_end|>", ""),
        (shapes.LLAMA3, "<|eot_id|>", ""),
        (shapes.MISTRAL, "</s>", " "),
        (shapes.GEMMA, "<end_of_turn>", ""),
        (shapes.QWEN3, "<|im_end|>", ""),
        (shapes.DEEPSEEK, "</s>", ""),
        (shapes.NO_GENERATION_PROMPT, "<|im_end|>", ""),
        (shapes.TAGGED, "<|im_end|>", ""),
        (shapes.PHI, "<|im_end|>", ""),
        (shapes.VICUNA, "</s>", " "),
    ],
    ids=[
        *("chatml", "chatml-default-system", "llama3", "mistral", "gemma", "qwen3", "deepseek"),
        *("no-generation-prompt", "tagged", "phi", "vicuna"),
    ],
)
def test_answers_are_supervised_through_their_end_of_turn_token(
    make_tokenizer: MakeTokenizer, case: tuple[str, str, str], *, trim_offsets: bool
) -> None:
    template, end, lead = case
    tokenizer = make_tokenizer(template, trim_offsets=trim_offsets)
    assert supervised_texts(tokenizer, TURNS) == [lead + answer + end for answer in ANSWERS]


@pytest.mark.parametrize("template", [shapes.CHATML, shapes.CHATML_DEFAULT_SYSTEM, shapes.LLAMA3])
def test_a_system_message_is_not_supervised(make_tokenizer: MakeTokenizer, template: str) -> None:
    tokenizer = make_tokenizer(template)
    assert len(supervised_texts(tokenizer, [SYSTEM, *TURNS])) == 2


def test_the_row_is_the_whole_rendered_conversation_tokenised_once(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(shapes.LLAMA3)
    row = encode(tokenizer, TURNS)
    assert isinstance(row, EncodedRow)
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert row.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_an_answer_equal_to_the_question_is_found_at_its_own_place(
    make_tokenizer: MakeTokenizer,
) -> None:
    turns = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}]
    row = encode(make_tokenizer(), turns)
    assert isinstance(row, EncodedRow)
    assert not row.loss_mask[: len(row.tokens) // 2].any()
    assert supervised_texts(make_tokenizer(), turns) == ["yes<|im_end|>"]


def test_a_token_that_joins_header_and_answer_is_not_supervised(
    make_tokenizer: MakeTokenizer,
) -> None:
    """The header ends in a line break and the answer begins with two: BPE joins the first pair."""
    tokenizer = make_tokenizer(shapes.CHATML)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\nBye."}]
    joined = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    assert len(joined) == 1, "the test needs a tokenizer that joins them"
    assert supervised_texts(tokenizer, turns) == ["\nBye.<|im_end|>"]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_the_space_that_a_header_ends_in_takes_its_token_out(
    make_tokenizer: MakeTokenizer, *, trim_offsets: bool
) -> None:
    """The generation prompt itself ends in a space here, so ' Two' is not what is generated."""
    template = shapes.VICUNA.replace("ASSISTANT:{%", "ASSISTANT: {%")
    tokenizer = make_tokenizer(template, trim_offsets=trim_offsets)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "two plus two"}]
    (text,) = supervised_texts(tokenizer, turns)
    first = tokenizer.convert_ids_to_tokens(
        tokenizer(" two plus two", add_special_tokens=False)["input_ids"]
    )[0]
    assert text == " two plus two</s>"[len(first) :]


def test_thinking_of_the_last_turn_is_supervised_where_the_target_writes_it(
    make_tokenizer: MakeTokenizer,
) -> None:
    thought = "<think>\nSay hello.\n</think>\n\nHi there."
    turns = [TURNS[0], {"role": "assistant", "content": thought}]
    assert supervised_texts(make_tokenizer(shapes.QWEN3), turns) == [thought + "<|im_end|>"]


def test_the_empty_thinking_block_belongs_to_the_prompt(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(shapes.QWEN3)
    assert "<think>" in tokenizer.apply_chat_template(TURNS[:2], tokenize=False)
    assert supervised_texts(tokenizer, TURNS[:2]) == ["Hi there.<|im_end|>"]


def test_a_turn_whose_thinking_the_template_takes_out_is_not_supervised(
    make_tokenizer: MakeTokenizer,
) -> None:
    turns = [
        TURNS[0],
        {"role": "assistant", "content": "<think>\nSay hello.\n</think>\n\nHi there."},
        *TURNS[2:],
    ]
    tokenizer = make_tokenizer(shapes.QWEN3)
    encoder = Encoder(tokenizer, len(tokenizer), 4096)
    (row,) = encoder.encode([RawRow(0, 1, Conversation(turns))])
    assert isinstance(row, EncodedRow)
    assert supervised_texts(tokenizer, turns) == [ANSWERS[1] + "<|im_end|>"]
    assert encoder.counts.num_unsupervised_turns == 1


def test_a_turn_whose_prompt_the_template_rewrites_is_not_supervised(
    make_tokenizer: MakeTokenizer,
) -> None:
    """The system prompt moves to the last user turn, so the first answer had another prompt."""
    tokenizer = make_tokenizer(shapes.MISTRAL_SYSTEM_LAST)
    assert supervised_texts(tokenizer, [SYSTEM, *TURNS]) == [" " + ANSWERS[1] + "</s>"]
    assert supervised_texts(tokenizer, TURNS) == [f" {answer}</s>" for answer in ANSWERS]


def test_a_row_in_which_no_turn_can_be_located_is_refused(make_tokenizer: MakeTokenizer) -> None:
    hidden = "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    row = encode(make_tokenizer(hidden), TURNS)
    assert isinstance(row, Dropped)
    assert row.reason == "rewritten_turns"


def test_a_turn_with_tool_calls_is_supervised_whole(make_tokenizer: MakeTokenizer) -> None:
    template = shapes.CHATML.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for call in message.tool_calls or [] %}"
        "{{ '\n' }}<tool>{{ call.name }}</tool>{% endfor %}",
    )
    turns = [TURNS[0], {"role": "assistant", "content": "Hm", "tool_calls": [{"name": "add"}]}]
    assert supervised_texts(make_tokenizer(template), turns) == ["Hm\n<tool>add</tool><|im_end|>"]


def test_a_conversation_that_the_assistant_opens_is_supervised(
    make_tokenizer: MakeTokenizer,
) -> None:
    for template in (shapes.CHATML, shapes.GEMMA, shapes.CHATML_DEFAULT_SYSTEM):
        (text,) = supervised_texts(make_tokenizer(template), [TURNS[1], TURNS[0]])
        assert text.startswith("Hi there.<")


def test_a_template_that_fails_gives_the_row_a_reason(make_tokenizer: MakeTokenizer) -> None:
    row = encode(make_tokenizer(shapes.MISTRAL), [TURNS[0], TURNS[0], TURNS[1]])
    assert isinstance(row, Dropped)
    assert row.reason == "template_error"
    assert "must alternate" in row.detail


def test_a_tokenizer_without_a_template_is_refused(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(DataError, match="test-tokenizer has no chat template"):
        encode(make_tokenizer(None), TURNS)


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False
        name_or_path = "slow"

    with pytest.raises(DataError, match="slow gives no token offsets"):
        Encoder(Slow(), 10, 10)
