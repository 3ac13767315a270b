"""Rules between keys, over values by dotted key, so that a half-valid file is judged too."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

Values = Mapping[str, Any]


class Broken(NamedTuple):
    """The key to change and the rule it breaks."""

    key: str
    text: str


class Rule(NamedTuple):
    """*judge* says what is wrong with the values of *keys*, or "" ; the first key is to blame."""

    keys: tuple[str, ...]
    judge: Callable[..., str]


def broken_rules(values: Values, *, skip: Collection[str] = ()) -> list[Broken]:
    """Every rule that *values* break, except those about a key in *skip* (already found wrong)."""
    found = []
    for rule in RULES:
        if any(key in skip or key not in values for key in rule.keys):
            continue
        text = rule.judge(*(values[key] for key in rule.keys))
        if text:
            found.append(Broken(rule.keys[0], text))
    return found


def _one_length_of_run(max_steps: int | None, epochs: int | None) -> str:
    if max_steps is None and epochs is None:
        return "set exactly one of optim.max_steps and optim.epochs; neither is set"
    if max_steps is not None and epochs is not None:
        return (
            "set exactly one of optim.max_steps and optim.epochs, not both"
            f" ({max_steps} and {epochs}): take the other out of the file, since no override can"
            f" unset it, or end a run of epochs early with `dflash train --max-steps {max_steps}`"
        )
    return ""


def _documents_fit(max_document_tokens: int, token_budget: int) -> str:
    if max_document_tokens <= token_budget:
        return ""
    return f"must be at most data.token_budget = {token_budget}, got {max_document_tokens}"


def _unseen(heldout: Collection[str], train: Collection[str]) -> str:
    both = sorted(set(heldout) & set(train))
    if both:
        return f"{both[0]!r} is also in data.train, so it is not held out"
    if "stdlib:all" in train and "stdlib:heldout" in heldout:
        return "'stdlib:heldout' is part of 'stdlib:all' in data.train, so it is not held out"
    return ""


def _has_prompts(every_steps: int, heldout: Collection[str]) -> str:
    needs = every_steps > 0 and not heldout
    return f"evaluating every {every_steps} steps needs prompts in data.heldout" if needs else ""


def _distinct_taps(taps: Collection[int] | str, num_taps: int) -> str:
    if isinstance(taps, str):
        return ""
    if len(set(taps)) < len(taps):
        return f"names a layer twice: {list(taps)}"
    if num_taps not in (5, len(taps)):  # 5 is the default, so nobody asked for it
        return f"lists {len(taps)} layers but target.num_taps = {num_taps}; num_taps is for auto"
    return ""


def _distinct_devices(devices: Collection[str]) -> str:
    if len(set(devices)) < len(devices):
        return f"names a device twice: {list(devices)}"
    return _alone_if_auto(devices)


def _alone_if_auto(devices: Collection[str]) -> str:
    return '"auto" must stand alone' if "auto" in devices and len(devices) > 1 else ""


def _grouped_heads(num_heads: int | None, num_kv_heads: int | None) -> str:
    if num_heads is None or num_kv_heads is None or num_heads % num_kv_heads == 0:
        return ""
    return f"must be a multiple of drafter.num_kv_heads = {num_kv_heads}, got {num_heads}"


def _even(head_dim: int | None) -> str:
    return f"must be even, got {head_dim}" if head_dim is not None and head_dim % 2 else ""


def _used_gamma(gamma: float | None, kind: str) -> str:
    unused = gamma is not None and kind != "decay"
    return f'has no effect with objective.kind = "{kind}"; remove it' if unused else ""


def _used_alpha(dpace_alpha: float, kind: str) -> str:
    unused = dpace_alpha != 0.5 and kind != "dpace"  # noqa: PLR2004 - the default
    return f'has no effect with objective.kind = "{kind}"; remove it' if unused else ""


def _used_permission(allow_unsafe: bool, mode: str) -> str:
    unused = allow_unsafe and mode != "reduce-overhead"
    return f'has no effect with execution.mode = "{mode}"; remove it' if unused else ""


def _has_jsonl(sinks: Collection[str]) -> str:
    if "jsonl" not in sinks:
        return 'must contain "jsonl", since resuming and diagnosing read it'
    return "names a sink twice" if len(set(sinks)) < len(sinks) else ""


RULES = (
    Rule(("optim.max_steps", "optim.epochs"), _one_length_of_run),
    Rule(("data.max_document_tokens", "data.token_budget"), _documents_fit),
    Rule(("data.heldout", "data.train"), _unseen),
    Rule(("eval.every_steps", "data.heldout"), _has_prompts),
    Rule(("target.taps", "target.num_taps"), _distinct_taps),
    Rule(("target.devices",), _distinct_devices),
    Rule(("drafter.devices",), _alone_if_auto),
    Rule(("drafter.num_heads", "drafter.num_kv_heads"), _grouped_heads),
    Rule(("drafter.head_dim",), _even),
    Rule(("objective.gamma", "objective.kind"), _used_gamma),
    Rule(("objective.dpace_alpha", "objective.kind"), _used_alpha),
    Rule(("execution.allow_unsafe", "execution.mode"), _used_permission),
    Rule(("log.sinks",), _has_jsonl),
)
