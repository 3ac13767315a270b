"""The target writes conversations: from its template, resumable, without empty or looping rows."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from chat_templates import QWEN3, MakeTokenizer
from transformers import PreTrainedTokenizerFast

from dflash.data.prepare import prepare
from dflash.data.synthesis import Synthesis, SynthesisSettings
from dflash.data.synthesize import BATCHES_PER_SHARD, is_looping, synthesize, text_digest
from dflash.errors import DataError


class Writer:
    """Stands for the target: random letters, ended by the stop token; remembers its prompts."""

    def __init__(self, stop: int, *, answer: list[int] | None = None) -> None:
        self.stop = stop
        self.answer = answer
        self.prompts: list[list[int]] = []
        self.temperatures: list[float] = []
        self.seeds: list[int] = []

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
        assert (top_p, list(stop_ids)) == (1.0, [self.stop])
        self.prompts += prompts
        self.temperatures.append(temperature)
        self.seeds.append(seed)
        choose = random.Random(seed)
        if self.answer is not None:
            return [self.answer for _ in prompts]
        return [
            [choose.randrange(60, 90) for _ in range(max_new_tokens - 1)] + [self.stop]
            for _ in prompts
        ]


def settings(tokenizer: PreTrainedTokenizerFast, **changed: object) -> SynthesisSettings:
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    base = SynthesisSettings(
        source="test",
        stop_ids=(stop,),
        batch_size=3,
        max_user_tokens=8,
        max_answer_tokens=12,
        temperature=0.7,
        answer_temperature=0.2,
    )
    return SynthesisSettings(
        **{**{key: getattr(base, key) for key in base.__slots__}, **changed}  # type: ignore[arg-type]
    )


def rows_of(folder: Path) -> list[dict[str, list[dict[str, str]]]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def test_user_turns_follow_the_user_header_and_answers_the_generation_prompt(
    tmp_path: Path, make_tokenizer: MakeTokenizer
) -> None:
    tokenizer = make_tokenizer(QWEN3)
    wanted = settings(tokenizer)
    writer = Writer(wanted.stop_ids[0])
    synthesize(writer, tmp_path, tokenizer=tokenizer, num_rows=3, settings=wanted)
    assert tokenizer.decode(writer.prompts[0]) == "<|im_start|>user\n"
    user = rows_of(tmp_path)[0]["messages"][0]["content"]
    assert tokenizer.decode(writer.prompts[3]) == (
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_user_turns_and_answers_have_temperatures_of_their_own(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    wanted = settings(tokenizer)
    writer = Writer(wanted.stop_ids[0])
    synthesize(writer, tmp_path, tokenizer=tokenizer, num_rows=3, settings=wanted)
    assert writer.temperatures == [0.7, 0.2] * BATCHES_PER_SHARD


def test_a_user_turn_of_another_folder_does_not_recur(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    wanted = settings(tokenizer)

    def run(folder: str, *, not_in: list[Path]) -> set[str]:
        synthesize(
            Writer(wanted.stop_ids[0]),
            tmp_path / folder,
            tokenizer=tokenizer,
            num_rows=3,
            settings=wanted,
            not_in=not_in,
        )
        return {row["messages"][0]["content"] for row in rows_of(tmp_path / folder)}

    train = run("train", not_in=[])
    assert run("same seed, same turns", not_in=[]) == train
    assert train.isdisjoint(run("heldout", not_in=[tmp_path / "train"]))
    with pytest.raises(DataError, match=r"nowhere: holds no synthesized conversations"):
        run("other", not_in=[tmp_path / "nowhere"])


def test_the_rows_are_what_prepare_reads(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    wanted = settings(tokenizer)
    written = synthesize(
        Writer(wanted.stop_ids[0]),
        tmp_path / "s",
        tokenizer=tokenizer,
        num_rows=20,
        settings=wanted,
    )
    dataset = prepare(
        [tmp_path / "s"],
        tmp_path / "out",
        tokenizer=tokenizer,
        max_document_tokens=100,
        max_bad_share=0.0,
        vocab_size=len(tokenizer),
    )
    assert len(dataset) == written.num_rows >= 20
    tokens, mask = dataset.row(0)
    assert int(mask.sum()) == 12
    answer = rows_of(tmp_path / "s")[0]["messages"][1]["content"]
    assert tokenizer.decode(tokens[mask].tolist()).strip() == answer + "<|im_end|>"


def test_a_run_goes_on_where_it_ended(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    wanted = settings(tokenizer)
    per_shard = 3 * BATCHES_PER_SHARD

    def run(folder: str, num_rows: int) -> tuple[Synthesis, Writer]:
        writer = Writer(wanted.stop_ids[0])
        state = synthesize(
            writer, tmp_path / folder, tokenizer=tokenizer, num_rows=num_rows, settings=wanted
        )
        return state, writer

    run("parts", per_shard)
    state, writer = run("parts", 3 * per_shard)
    assert len(writer.seeds) == 2 * 2 * BATCHES_PER_SHARD
    whole, _ = run("whole", 3 * per_shard)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    assert state == whole
    assert len({shard.seed for shard in state.shards}) == 3
    _, idle = run("parts", per_shard)
    assert idle.seeds == []


def test_exactly_as_many_conversations_are_written_as_were_asked_for(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    wanted = settings(tokenizer)

    def run(folder: str, num_rows: int) -> Synthesis:
        return synthesize(
            Writer(wanted.stop_ids[0]),
            tmp_path / folder,
            tokenizer=tokenizer,
            num_rows=num_rows,
            settings=wanted,
        )

    for num_rows in (5, 5, 7, 40):
        assert run("parts", num_rows).num_rows == num_rows
        assert len(rows_of(tmp_path / "parts")) == num_rows
    assert run("whole", 40) == run("parts", 40)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    assert run("parts", 3).num_rows == 40, "what is there stays"
    shards = run("parts", 40).shards
    assert all(one.num_rows + sum(one.dropped.values()) == one.num_drawn for one in shards)


def test_a_cut_that_was_interrupted_is_made_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    wanted = settings(tokenizer)

    def run(num_rows: int) -> int:
        writer = Writer(wanted.stop_ids[0])
        synthesize(writer, tmp_path, tokenizer=tokenizer, num_rows=num_rows, settings=wanted)
        return len({row["messages"][0]["content"] for row in rows_of(tmp_path)})

    assert run(4) == 4
    (whole,) = tmp_path.glob("*.whole")
    (tmp_path / "part-00000.jsonl").write_bytes(whole.read_bytes())  # before the state was written
    assert run(9) == 9


def test_a_folder_of_other_files_is_left_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "part-00000.jsonl").write_text("mine")
    wanted = settings(tokenizer)
    writer = Writer(wanted.stop_ids[0])
    with pytest.raises(DataError, match=r"holds other files \(part-00000.jsonl\)"):
        synthesize(writer, tmp_path, tokenizer=tokenizer, num_rows=1, settings=wanted)
    assert writer.prompts == []
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_other_settings_do_not_join_a_folder(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    wanted = settings(tokenizer)
    writer = Writer(wanted.stop_ids[0])
    synthesize(writer, tmp_path, tokenizer=tokenizer, num_rows=1, settings=wanted)
    with pytest.raises(DataError, match=r"other settings \(seed differ\)"):
        synthesize(
            writer,
            tmp_path,
            tokenizer=tokenizer,
            num_rows=1,
            settings=settings(tokenizer, seed=1),
        )


@pytest.mark.parametrize("case", [([], "empty user turn"), ([70] * 40, "looping user turn")])
def test_a_target_that_writes_nothing_usable_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, case: tuple[list[int], str]
) -> None:
    wanted = settings(tokenizer)
    answer, reason = case
    writer = Writer(wanted.stop_ids[0], answer=answer)
    with pytest.raises(DataError, match=reason):
        synthesize(writer, tmp_path, tokenizer=tokenizer, num_rows=1, settings=wanted)


def test_a_share_of_user_turns_begins_with_given_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    lines = ["What is two plus two?", "  How are you today?"]
    wanted = settings(tokenizer, text_share=0.5, text_sha256=text_digest(lines))
    synthesize(
        Writer(wanted.stop_ids[0]),
        tmp_path,
        tokenizer=tokenizer,
        num_rows=20,
        settings=wanted,
        text_lines=lines,
    )
    users = [row["messages"][0]["content"] for row in rows_of(tmp_path)]
    seeded = [user for user in users if user[:4] in {"What", "How "}]
    assert 0.2 < len(seeded) / len(users) < 0.8


@pytest.mark.parametrize(
    ("ids", "looping"),
    [
        (list(range(100)), False),
        ([7] * 30, True),
        (list(range(50)) + [1, 2, 3, 4, 5] * 8, True),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99] * 5, True),
        ([1, 2, 1, 2], False),
        ([], False),
    ],
)
def test_loops_are_seen(ids: list[int], looping: bool) -> None:
    assert is_looping(ids) is looping
