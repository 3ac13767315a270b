"""The README of an exported drafter: what it is, what was measured, how to serve it.

Paths are shown by their last part only: a card is published, a machine's folders are not.
"""

import tomllib
from pathlib import Path
from typing import Any

from dflash import __version__
from dflash.records import EvalRecord, read_records
from dflash.train.stored import StoredDrafter

NOT_MEASURED = "not measured"


def model_card(stored: StoredDrafter, *, layout: str) -> str:
    """Return the card of *stored*; figures come from its run folder where it still has one."""
    name = target_name(stored.target_source)
    rows = "\n".join(f"| {what} | {value} |" for what, value in _facts(stored, name))
    return f"""---
tags:
- speculative-decoding
- dflash
---

# DFlash drafter for {name}

A block-diffusion drafter: it proposes {stored.shape.block_size - 1} tokens in one forward, from \
hidden states of {name}, which verifies them. The text is that of {name}; only the speed changes.

| | |
|---|---|
{rows}

tau is the mean number of tokens committed per verify step, the target's own token included,
averaged per prompt and then over prompts.

## Use

{_usage(stored, name, layout)}
"""


def target_name(source: str | None) -> str:
    """How a card calls the target."""
    return Path(source).name if source else "its target"


def _facts(stored: StoredDrafter, name: str) -> list[tuple[str, str]]:
    shape = stored.shape
    fingerprint = stored.target_fingerprint
    facts = [
        ("target", f"{name} (fingerprint {fingerprint[:12]})" if fingerprint else name),
        ("tau", _tau(stored)),
        ("training steps", "unknown" if stored.step is None else f"{stored.step:,}"),
        ("parameters", f"{shape.num_parameters:,} in bf16, without embedding and head"),
        ("layers, block size", f"{shape.num_layers} layers, blocks of {shape.block_size}"),
        ("tapped target layers", ", ".join(map(str, shape.target_layer_ids))),
        ("mask token id", str(shape.mask_token_id)),
    ]
    return [*facts, *_training(stored), ("trained with", f"dflash {__version__}")]


def _tau(stored: StoredDrafter) -> str:
    record = _eval_record(stored)
    if record is not None:
        return (
            f"{record.tau:.2f} on {record.num_prompts} held-out prompts, "
            f"{record.max_new_tokens} new tokens, temperature {record.temperature:g}"
        )
    return NOT_MEASURED if stored.tau is None else f"{stored.tau:.2f} on held-out prompts"


def _eval_record(stored: StoredDrafter) -> EvalRecord | None:
    """The last evaluation of exactly this step; another step's figure is not this drafter's."""
    path = None if stored.run_dir is None else stored.run_dir / "records.jsonl"
    if path is None or not path.is_file():
        return None
    found = [
        record
        for record in read_records(path)
        if isinstance(record, EvalRecord) and record.step == stored.step
    ]
    return found[-1] if found else None


def _training(stored: StoredDrafter) -> list[tuple[str, str]]:
    path = None if stored.run_dir is None else stored.run_dir / "config.toml"
    if path is None or not path.is_file():
        return []
    config: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    data, objective = config.get("data", {}), config.get("objective", {})
    facts = [("training data", ", ".join(Path(source).name for source in data.get("train", [])))]
    heldout = ", ".join(Path(source).name for source in data.get("heldout", []))
    if heldout:
        facts.append(("held-out data", heldout))
    kind = objective.get("kind", "decay")
    detail = {"decay": "gamma", "dpace": "dpace_alpha"}.get(kind, "")
    value = objective.get(detail)
    facts.append(("objective", kind if value is None else f"{kind}, {detail} = {value}"))
    return facts


def _usage(stored: StoredDrafter, name: str, layout: str) -> str:
    drafts = stored.shape.block_size - 1
    if layout == "speculators":
        return f"""The folder holds the embedding and the head of {name} too, in the format of the
speculators library:

```
vllm serve THIS_FOLDER
```"""
    return f"""```
vllm serve {name} \\
  --speculative-config '{{"method": "dflash", "model": "THIS_FOLDER", \
"num_speculative_tokens": {drafts}}}'

python -m sglang.launch_server --model-path {name} --speculative-algorithm DFLASH \\
  --speculative-draft-model-path THIS_FOLDER --speculative-num-draft-tokens {drafts + 1}
```

The weights are those of z-lab's `DFlashDraftModel`; to load them with transformers'
`AutoModel.from_pretrained(..., trust_remote_code=True)`, put z-lab's `dflash.py` beside them."""
