"""Where a figure was measured: without machine, versions and commit it is not published."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
"""Of the JSON that the benches write; another number means other names or meanings."""


def machine_facts(device: torch.device, *, case: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return schema, case, date, device, versions, commit and command, for the head of a JSON."""
    on_gpu = device.type == "cuda"
    return {
        "schema": SCHEMA,
        "case": case,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "num_gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", f"dflash_bench.{case}", *arguments]),
    }


def commit() -> str | None:
    """The commit of the working tree this was started in, "+" after it when changed; or None."""
    folder = Path(__file__).parent
    try:
        asked = [
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603, S607
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return asked[0].stdout.strip() + ("+" if asked[1].stdout.strip() else "")


def write_json(found: dict[str, Any], file: Path | None) -> None:
    """Write *found* to *file*, if there is one."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def say(text: str) -> None:
    """Tell of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
