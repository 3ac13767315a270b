"""Conversations that the target writes itself: a sampled user turn, then its own answer.

A drafter learns to predict the target, so what the target says is the right text to learn from.
The user turn is what the target itself writes after the user header of its chat template; a share
of them can begin with a few words of given text files.

Rows go to JSONL shards, each from its own seed, each renamed in when complete: running again goes
on after the last one. A row holds the messages and the very token ids that were generated.
"""

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dflash.data.chat import ChatTemplate, tokenizer_hash
from dflash.errors import DataError

BATCHES_PER_SHARD = 8
STATE_NAME = "synthesis.json"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisSettings:
    """What decides the text; a folder belongs to one set of these."""

    source: str
    stop_ids: tuple[int, ...]
    batch_size: int = 64
    max_user_tokens: int = 128
    max_answer_tokens: int = 512
    temperature: float = 1.0
    answer_temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    text_share: float = 0.0
    text_sha256: str = ""


@dataclass(frozen=True, slots=True)
class SynthesisShard:
    """One finished shard: rows kept, rows drawn, dropped rows by reason, and its seed."""

    file: str
    seed: int
    num_rows: int
    num_drawn: int
    dropped: dict[str, int]


@dataclass(slots=True)
class Synthesis:
    """What a folder holds so far."""

    settings: SynthesisSettings
    shards: list[SynthesisShard] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Conversations kept."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def dropped(self) -> Counter[str]:
        """Dropped conversations by reason."""
        total: Counter[str] = Counter()
        for shard in self.shards:
            total.update(shard.dropped)
        return total


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
    """Write shards into *out* until at least *num_rows* conversations are there.

    Args:
        generate: samples from the target.
        text_lines: what seeded user turns may begin with; ``settings.text_share`` says how many.
        not_in: folders of other conversations; their user turns count as repeated here.
        on_shard: called after every shard.

    Raises:
        DataError: the folder holds conversations of other settings, or nothing usable comes.
    """
    writer = _Writer(generate, tokenizer, settings, [line for line in text_lines if line.strip()])
    out.mkdir(parents=True, exist_ok=True)
    state = _read_state(out, settings)
    seen = {
        row["messages"][0]["content"] for row in _rows(out, [shard.file for shard in state.shards])
    }
    seen |= {row["messages"][0]["content"] for other in not_in for row in _other_rows(other)}
    while state.num_rows < num_rows:
        shard = writer.shard(out, number=len(state.shards), seen=seen)
        state.shards.append(shard)
        _write_beside(out / STATE_NAME, json.dumps(asdict(state), indent=1))
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

    def shard(self, out: Path, *, number: int, seen: set[str]) -> SynthesisShard:
        """Draw one shard and rename it in."""
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
        _write_beside(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        num_drawn = self.settings.batch_size * BATCHES_PER_SHARD
        return SynthesisShard(path.name, seed, len(rows), num_drawn, dict(dropped))

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


def _read_state(out: Path, settings: SynthesisSettings) -> Synthesis:
    path = out / STATE_NAME
    if not path.exists():
        return Synthesis(settings)
    try:
        value = json.loads(path.read_bytes())
        stored = {**value["settings"], "stop_ids": tuple(value["settings"]["stop_ids"])}
        shards = [SynthesisShard(**shard) for shard in value["shards"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error})", hint="remove the folder") from error
    wanted = asdict(settings)
    different = [key for key, setting in wanted.items() if stored.get(key) != setting]
    if different:
        raise DataError(
            f"{out}: holds conversations of other settings ({', '.join(different)} differ)",
            hint="use another --out, or the settings of that run",
        )
    return Synthesis(settings, shards)


def _other_rows(folder: Path) -> Iterator[dict[str, Any]]:
    if not (folder / STATE_NAME).is_file():
        raise DataError(f"{folder}: holds no synthesized conversations ({STATE_NAME} is missing)")
    stored = json.loads((folder / STATE_NAME).read_bytes())
    return _rows(folder, [shard["file"] for shard in stored["shards"]])


def _rows(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        try:
            with (folder / name).open(encoding="utf-8") as file:
                yield from map(json.loads, file)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / name}: damaged ({error})") from error


def _write_beside(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.partial")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
