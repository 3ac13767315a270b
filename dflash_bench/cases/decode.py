"""Decoding with a drafter and without: tokens a second, and tau, the tokens of a verify step.

``plain`` is the target alone, one token a step, captured where that can be; ``eager`` and
``captured`` draft blocks, called from Python or replayed. Models are those of ``Setting.drafter``,
a run folder or a checkpoint; without, both have random weights, and then tau says nothing.
"""

import hashlib
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from dflash.data.prompt_files import read_prompts
from dflash.decode import Decoded, DecodeLimits, Replays, plain_decode, speculative_decode
from dflash.drafter.model import Drafter
from dflash.errors import DataError
from dflash.execution import CaptureError, capture_watch
from dflash.target.model import Target
from dflash.train.evaluation import summarise
from dflash.train.pair import heldout_of, load_pair, require_pair, require_prompts_of
from dflash.train.stored import drafter_of
from dflash_bench.cases import MODES
from dflash_bench.cases._case import Case, Found, Setting, target_device
from dflash_bench.counters import Counters
from dflash_bench.planned import decode_gib, dtype_on
from dflash_bench.random_target import random_target

NEW_TOKENS = {"cuda": 64, "cpu": 16}
"""Of an answer; on a CPU only enough to see that all works."""

PROMPT_TOKENS = 128
VARYING_TOKENS = (16, 384)
"""Shortest and longest prompt of varying lengths."""

NUM_RANDOM_PROMPTS = 16
MAX_PROMPTS_A_TURN = 2
"""Many short turns say more than few long ones."""


class Models:
    """A target, its drafter, and prompts for them, loaded or drawn."""

    def __init__(self, setting: Setting) -> None:
        if not setting.drafter:
            self.weights = "random"
            self.target, self.drafter = random_models(setting)
            self.prompts = random_prompts(setting)
            self.stop_ids: tuple[int, ...] = ()
            return
        pair = load_pair(Path(setting.drafter), device=setting.target_device)
        self.weights = str(pair.stored.path)
        self.target, self.drafter = pair.target, pair.drafter
        self.stop_ids = pair.target.stop_ids
        if setting.data:
            self.prompts = read_prompts(setting.data[0], tokenizer=pair.target.tokenizer)
        else:
            self.prompts = heldout_of(pair)


def random_models(setting: Setting) -> tuple[Target, Drafter]:
    """A target and a drafter of the shape's sizes with random weights."""
    device, dtype = torch.device(setting.target_device), dtype_on(setting.target_device)
    target = random_target(setting.shape, device=device, dtype=dtype, seed=setting.seed)
    drafter = Drafter(setting.shape.drafter)
    drafter.initialise(setting.seed)
    weights = drafter.state_dict()
    return target, drafter_of(setting.shape.drafter, weights, device=device, dtype=dtype)


def random_prompts(setting: Setting) -> list[list[int]]:
    """Random tokens; as many in every prompt, or from 16 to 384."""
    random = torch.Generator().manual_seed(setting.seed)
    shortest, longest = VARYING_TOKENS
    lengths = torch.randint(shortest, longest + 1, (NUM_RANDOM_PROMPTS,), generator=random)
    if setting.lengths == "fixed":
        lengths = torch.full_like(lengths, PROMPT_TOKENS)
    vocabulary = setting.shape.drafter.vocab_size
    return [
        torch.randint(0, vocabulary, (length,), generator=random).tolist()
        for length in lengths.tolist()
    ]


class Decoding:
    """A subject: prompts one after another; a timed step is a token, by the mean of an answer."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._next = 0
        self._decoded: list[Decoded] = []

    def build(self) -> dict[str, Any]:
        started, device = time.perf_counter(), torch.device(self.setting.target_device)
        self._capturing = capture_watch()
        self.models = Models(self.setting)
        self._counters = Counters(device)
        self._limits = DecodeLimits(
            max_new_tokens=NEW_TOKENS[device.type], stop_ids=self.models.stop_ids
        )
        because = "eager decoding was asked for" if self.setting.mode == "eager" else None
        self._replays = Replays(self.models.target, eager_because=because)
        return {"build_s": time.perf_counter() - started, "padded": False}

    def prepare(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._first = self._decode(0)
        if self.setting.mode == "captured" and self._first.decode_loop != "captured":
            raise CaptureError(f"decoding was not captured: {self._first.eager_because}")
        self._counters.begin()
        return {
            "warm_up_s": time.perf_counter() - started,
            "capture_s": self._capturing.seconds,
        }

    def turn(self) -> list[float]:
        times: list[float] = []
        for _ in range(min(self.setting.turn_steps, MAX_PROMPTS_A_TURN)):
            one = self._decode_next()
            self._decoded.append(one)
            times.append(one.decode_s * 1e3 / one.num_decoded)
        self._counters.read(self._next)
        return times

    def restart(self) -> None:
        """Begin again with the prompts of the first turn."""
        self._next = 0

    def so_far(self) -> Found:
        return {
            **self._counters.found(),
            "capture_s": self._capturing.seconds,
            "units": 1.0,
            "averaged": [float(one.num_decoded) for one in self._decoded],
            "unsettled": self._given_up(),
        }

    def finish(self) -> dict[str, Any]:
        more = self._figures() if self._decoded else {"weights": self.models.weights}
        return {**self.so_far(), "more": more}

    def _decode_next(self) -> Decoded:
        """Of the next prompt whose answer does not end with its first token, which is no step."""
        for _ in self.models.prompts:
            one = self._decode(self._next)
            self._next += 1
            if one.num_decoded:
                return one
        raise DataError(
            f"the target ends its answers to all {len(self.models.prompts)} prompts with their"
            " first token, so that nothing is decoded"
        )

    def _given_up(self) -> str:
        """Why it went on without graphs; captures for further lengths are in no answer's time."""
        if self.setting.mode != "captured":
            return ""
        launched = (one for one in self._decoded if one.decode_loop != "captured")
        first = next(launched, None)
        return "" if first is None else f"it was captured no more: {first.eager_because}"

    def _figures(self) -> dict[str, object]:
        every = summarise(self._decoded, [], block_size=self.models.drafter.shape.block_size)
        return {
            "tau": every.tau,
            "loop": every.decode_loop,
            "weights": self.models.weights,
            "prefill ms": statistics.median(one.prefill_s * 1e3 for one in self._decoded),
            "details": {
                "accepted_per_position": every.accepted_per_position,
                "steps_by_accepted_tokens": every.steps_by_accepted_tokens,
                "num_verify_steps": every.num_verify_steps,
                "num_prompts": every.num_prompts,
                "max_new_tokens": self._limits.max_new_tokens,
                "eager_because": every.eager_because,
                "answer_sha256": hashlib.sha256(repr(self._first.tokens).encode()).hexdigest(),
            },
        }

    def _decode(self, number: int) -> Decoded:
        models = self.models
        prompt = models.prompts[number % len(models.prompts)]
        if self.setting.mode == "plain":
            return plain_decode(models.target, prompt, limits=self._limits, replays=self._replays)
        return speculative_decode(
            models.target, models.drafter, prompt, limits=self._limits, replays=self._replays
        )


def require_files(setting: Setting) -> tuple[str, ...]:
    """The drafter, its target, and prompts; random weights are given random tokens."""
    if not setting.drafter:
        return ()
    require_pair(Path(setting.drafter))
    require_prompts_of(Path(setting.drafter), setting.data[0] if setting.data else None)
    return ("drafter", "data")


def why_not(setting: Setting) -> str:
    """Only a GPU captures."""
    if setting.mode == "captured" and setting.target_device == "cpu":
        return "captured decoding needs a CUDA device"
    return ""


def planned_gib(setting: Setting) -> float | None:
    """Of random weights; how large stored ones are is not read beforehand."""
    if setting.drafter:
        return None
    longest = PROMPT_TOKENS if setting.lengths == "fixed" else VARYING_TOKENS[1]
    longest += NEW_TOKENS[torch.device(setting.target_device).type]
    longest += setting.shape.drafter.block_size
    return decode_gib(setting, num_tokens=longest)


CASE = Case(
    name="decode",
    help="decoding with a drafter and without: tau and tokens a second",
    make=Decoding,
    modes=MODES["decode"],
    devices=target_device,
    require_files=require_files,
    why_not=why_not,
    planned_gib=planned_gib,
)
