"""Conversations that the target writes itself: a sampled user turn, then its own answer.

A drafter learns to predict the target, so what the target says is the right text to learn from.
The user turn is what the target itself writes after the user header of its chat template; a share
of them can begin with a few words of given text files.

Rows go to JSONL shards (``dflash.data.synthesis``), each from its own seed: running again goes on
after the last one. A row holds the messages and the very token ids that were generated.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dflash.data.chat import ChatTemplate, tokenizer_hash
from dflash.data.synthesis import (
    NOT_ASKED_FOR,
    Synthesis,
    SynthesisSettings,
    SynthesisShard,
    drawn_rows,
    other_rows,
    read_state,
    require_own,
    uncut,
    write_shard,
    write_state,
)
from dflash.errors import DataError

BATCHES_PER_SHARD = 8
MAX_FRUITLESS_SHARDS = 3
FRAGMENT_TOKENS = (4, 16)
"""A seeded user turn begins with this many tokens of a line of text."""

LOOP_NGRAM = 6
MAX_REPEATED_SHARE = 0.5
MAX_TAIL_PERIOD = 24
TAIL_REPEATS = 4


class Generate(Protocol):
    """Batched sampling from the target."""

    def __call__(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: Sequence[int],
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, through the stop token where one was reached."""


class Answered(NamedTuple):
    """A user text with the prompt that asks it and the tokens that answered."""

    user: str
    prompt: list[int]
    answer: list[int]


def synthesize(
    generate: Generate,
    out: Path,
    *,
    tokenizer: Any,  # noqa: ANN401  # transformers is untyped
    num_rows: int,
    settings: SynthesisSettings,
    text_lines: Sequence[str] = (),
    not_in: Sequence[Path] = (),
    on_shard: Callable[[Synthesis], None] = lambda _: None,
) -> Synthesis:
    """Write shards into *out* until *num_rows* conversations are there; more are left as they are.

    What the last shard has beyond them stays beside it, for a later call with more rows.

    Args:
        generate: samples from the target.
        text_lines: what seeded user turns may begin with; ``settings.text_share`` says how many.
        not_in: folders of other conversations; their user turns count as repeated here.
        on_shard: called after every shard.

    Raises:
        DataError: the folder holds conversations of other settings or other files, or nothing
            usable comes.
    """
    writer = _Writer(generate, tokenizer, settings, [line for line in text_lines if line.strip()])
    require_own(out)
    out.mkdir(parents=True, exist_ok=True)
    state = read_state(out, settings)
    write_state(out, state)
    seen = {row["messages"][0]["content"] for row in drawn_rows(out, state.shards)}
    seen |= {row["messages"][0]["content"] for other in not_in for row in other_rows(other)}
    uncut(out, state, num_rows=num_rows)
    while state.num_rows < num_rows:
        wanted = num_rows - state.num_rows
        shard = writer.shard(out, number=len(state.shards), seen=seen, num_rows=wanted)
        state.shards.append(shard)
        write_state(out, state)
        on_shard(state)
        last = state.shards[-MAX_FRUITLESS_SHARDS:]
        if len(last) == MAX_FRUITLESS_SHARDS and not any(entry.num_rows for entry in last):
            raise DataError(
                f"{settings.source}: {sum(entry.num_drawn for entry in last)} conversations in a"
                f" row are unusable: {dict(state.dropped)}",
                hint="another temperature, or a target that is tuned for conversation",
            )
    return state


@dataclass(slots=True)
class _Writer:
    generate: Generate
    tokenizer: Any
    settings: SynthesisSettings
    text_lines: list[str]
    template: ChatTemplate = field(init=False)
    user_prefix: list[int] = field(init=False)
    tokenizer_sha256: str = field(init=False)

    def __post_init__(self) -> None:
        self.template = ChatTemplate(self.tokenizer)
        self.user_prefix = self._ids(self.template.user_prefix())
        self.tokenizer_sha256 = tokenizer_hash(self.tokenizer)

    def shard(self, out: Path, *, number: int, seen: set[str], num_rows: int) -> SynthesisShard:
        """Draw one shard and rename it in, cut to *num_rows*; then all of it lies beside it."""
        seed = _seed(self.settings.seed, number)
        rows: list[dict[str, Any]] = []
        dropped: Counter[str] = Counter()
        for batch in range(BATCHES_PER_SHARD):
            for drawn in self._batch(_seed(seed, batch), dropped):
                reason = self._fault(drawn, seen)
                if reason:
                    dropped[reason] += 1
                else:
                    seen.add(drawn.user)
                    rows.append(self._row(drawn))
        path = out / f"part-{number:05d}.jsonl"
        if surplus := write_shard(path, rows, num_rows=num_rows):
            dropped[NOT_ASKED_FOR] = surplus
        num_drawn = self.settings.batch_size * BATCHES_PER_SHARD
        return SynthesisShard(path.name, seed, len(rows) - surplus, num_drawn, dict(dropped))

    def _batch(self, seed: int, dropped: Counter[str]) -> Iterator[Answered]:
        fragments = self._fragments(seed)
        written = self._sample(
            [self.user_prefix + fragment for fragment in fragments],
            max_new_tokens=self.settings.max_user_tokens,
            temperature=self.settings.temperature,
            seed=_seed(seed, 0),
        )
        users = []
        for fragment, new in zip(fragments, written, strict=True):
            ids = fragment + self._without_stop(new)
            text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
            if not text or is_looping(ids):
                dropped["looping user turn" if text else "empty user turn"] += 1
            else:
                users.append(text)
        if not users:
            return
        prompts = [self._ids(self._answer_prompt(text)) for text in users]
        answers = self._sample(
            prompts,
            max_new_tokens=self.settings.max_answer_tokens,
            temperature=self.settings.answer_temperature,
            seed=_seed(seed, 1),
        )
        for user, prompt, answer in zip(users, prompts, answers, strict=True):
            yield Answered(user, prompt, answer)

    def _fault(self, drawn: Answered, seen: set[str]) -> str:
        words = self._without_stop(drawn.answer)
        if not self.tokenizer.decode(words, skip_special_tokens=True).strip():
            return "empty answer"
        if is_looping(words):
            return "looping answer"
        return "repeated user turn" if drawn.user in seen else ""

    def _row(self, drawn: Answered) -> dict[str, Any]:
        text = self.tokenizer.decode(self._without_stop(drawn.answer), skip_special_tokens=True)
        return {
            "messages": [
                {"role": "user", "content": drawn.user},
                {"role": "assistant", "content": text.strip()},
            ],
            "input_ids": drawn.prompt + drawn.answer,
            "loss_mask": [0] * len(drawn.prompt) + [1] * len(drawn.answer),
            "tokenizer": self.tokenizer_sha256,
        }

    def _answer_prompt(self, user: str) -> str:
        return self.template.generation_prompt([{"role": "user", "content": user}])

    def _fragments(self, seed: int) -> list[list[int]]:
        choose = random.Random(seed)
        fragments: list[list[int]] = []
        for _ in range(self.settings.batch_size):
            seeded = choose.random() < self.settings.text_share and self.text_lines
            line = choose.choice(self.text_lines).strip() if seeded else ""
            fragments.append(self._ids(line)[: choose.randint(*FRAGMENT_TOKENS)])
        return fragments

    def _sample(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        return self.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=self.settings.top_p,
            seed=seed,
            stop_ids=self.settings.stop_ids,
        )

    def _without_stop(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] in self.settings.stop_ids else ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def is_looping(ids: Sequence[int]) -> bool:
    """Tell whether a text repeats itself: half of its n-grams are old, or its tail is periodic."""
    grams = [tuple(ids[i : i + LOOP_NGRAM]) for i in range(len(ids) - LOOP_NGRAM + 1)]
    many = len(ids) >= LOOP_NGRAM * TAIL_REPEATS
    if many and 1 - len(set(grams)) / len(grams) > MAX_REPEATED_SHARE:
        return True
    for period in range(1, MAX_TAIL_PERIOD + 1):
        length = max(period * TAIL_REPEATS, MAX_TAIL_PERIOD)
        tail = ids[-length:]
        if len(ids) >= length and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


def text_digest(lines: Sequence[str]) -> str:
    """Return the sha256 of seed lines, "" for none."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def _seed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
