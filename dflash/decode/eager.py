"""The target's side of one prompt, and the loop's steps where nothing is captured."""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash.decode.answer import DecodeLimits
from dflash.decode.choice import GREEDY_BELOW, agreeing, drawn
from dflash.decode.proposer import Proposer, compute_dtype
from dflash.drafter.model import ContextCache, Drafter
from dflash.errors import UsageError
from dflash.target.sharing import decoder_layers

if TYPE_CHECKING:
    from dflash.target.model import Target

ROLLS_BACK = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types that keep one key and value a token, so that rejected tokens can be forgotten."""


class Session:
    """The target over one prompt: its growing cache, its taps, its choice of the next token."""

    def __init__(
        self,
        target: "Target",
        prompt_ids: Sequence[int],
        *,
        limits: DecodeLimits,
        generator: torch.Generator | None,
    ) -> None:
        from transformers import DynamicCache

        _check(target, prompt_ids)
        self.target = target
        self.outputs: dict[int, Tensor] = {}
        self.limits = limits
        self.device = torch.device(target.device)
        self.prompt_P = torch.tensor(list(prompt_ids), dtype=torch.int64, device=self.device)
        self.generator = generator or torch.Generator(self.device).manual_seed(0)
        # Without a config every layer keeps all its tokens, sliding ones too: the mask alone
        # limits what they read, and dropped tokens could not be brought back after a rejection.
        self.cache: Any = DynamicCache()

    @property
    def sampled(self) -> bool:
        return self.limits.temperature >= GREEDY_BELOW

    def logits(self, ids_B: Tensor, *, rows: int = 0) -> Tensor:
        """Append *ids_B* to the cache; return [rows, V], the last *rows* of them (0: all)."""
        with _tapped(self.target, self.outputs):
            out = self.target.model(
                input_ids=ids_B[None],
                use_cache=True,
                logits_to_keep=rows,
                **{cache_argument(self.target.model): self.cache},
            )
        logits_BV: Tensor = out.logits[0]
        return logits_BV

    def choose(self, logits_BV: Tensor) -> Tensor:
        """int64 [B]: what the target would go on with after each row."""
        if not self.sampled:
            return logits_BV.argmax(dim=-1)
        races_BV = torch.empty(logits_BV.shape, dtype=torch.float32, device=self.device)
        races_BV.exponential_(generator=self.generator)
        return drawn(logits_BV, temperature=self.limits.temperature, races_BV=races_BV)

    def features(self, num_tokens: int) -> Tensor:
        """[num_tokens, C]: what the taps gave for the first tokens of the last forward."""
        return torch.cat([self.outputs[tap][:num_tokens] for tap in self.target.taps], dim=-1)

    def forget(self, num_tokens: int) -> None:
        """Roll the cache back; 0 must not reach ``crop``, which older versions read as a length."""
        if num_tokens:
            self.cache.crop(-num_tokens)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Forwards inside leave no trace in the cache and the outputs."""
        layers, outputs = list(self.cache.layers), dict(self.outputs)
        kept = [(layer.keys, layer.values) for layer in layers]  # a growing cache copies to append
        try:
            yield
        finally:
            for layer, (keys, values) in zip(layers, kept, strict=True):
                layer.keys, layer.values = keys, values
            self.outputs.update(outputs)

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class EagerSteps:
    """Steps as Python calls over growing caches; tokens that were rejected are cut off again."""

    def __init__(self, session: Session, drafter: Drafter | None, choice_1: Tensor) -> None:
        self._session = session
        self._anchor_1 = choice_1
        self._proposer: Proposer | None = None
        self._num_new = len(session.prompt_P)
        if drafter is not None:
            size = drafter.shape.block_size
            self._size = size
            capacity = len(session.prompt_P) + session.limits.max_new_tokens + size
            self._context = ContextCache(
                drafter.shape,
                max_tokens=capacity,
                device=session.device,
                dtype=compute_dtype(session.target),
            )
            self._positions = torch.arange(capacity + size, device=session.device)
            self._proposer = Proposer(session.target, drafter, self._context)
            self._extend()

    def advance(self) -> tuple[int, list[int]]:
        """Verify one block; return how many drafts were accepted, and the target's choices."""
        if self._proposer is None:
            block_B = self._anchor_1
        else:
            self._extend()
            block_B = self._proposer.block(self._anchor_1, self._next_positions(self._size))
        choice_B = self._session.choose(self._session.logits(block_B))
        agree_1 = agreeing(block_B, choice_B)
        num_drafts, *choices = torch.cat([agree_1, choice_B]).tolist()  # the step's one host sync
        self._session.forget(len(choices) - num_drafts - 1)
        self._anchor_1 = choice_B[num_drafts : num_drafts + 1]
        self._num_new = num_drafts + 1
        return num_drafts, choices

    def _extend(self) -> None:
        """Give the drafter what the last forward committed."""
        if self._proposer is not None and self._num_new:
            features_PC = self._session.features(self._num_new)
            self._proposer.extend(features_PC, self._next_positions(self._num_new))
        self._num_new = 0

    def _next_positions(self, count: int) -> Tensor:
        return self._positions[self._context.length : self._context.length + count]


def cache_argument(model: Any) -> str:  # noqa: ANN401 (a transformers model)
    """transformers 5.2x calls the argument ``cache``, earlier ones ``past_key_values``."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@contextmanager
def _tapped(target: "Target", outputs: dict[int, Tensor]) -> Iterator[None]:
    """Keep what the tapped layers put out, in the very forward that verifies."""
    handles = tap_into(target.model, target.taps, outputs)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tap_into(
    model: Any,  # noqa: ANN401 (a transformers model)
    taps: Sequence[int],
    outputs: dict[int, Tensor],
) -> list[Any]:
    """Hook the tapped layers, so that their outputs are put into *outputs*; return the handles."""

    def keeper(tap: int) -> Callable[..., None]:
        def keep(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            outputs[tap] = (output if isinstance(output, Tensor) else output[0])[0]

        return keep

    _, layers = decoder_layers(model.get_decoder()) or ("", torch.nn.ModuleList())
    return [layers[tap].register_forward_hook(keeper(tap)) for tap in taps]


def _check(target: "Target", prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise UsageError("the prompt is empty: decoding needs at least one token to start from")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        wrong = next(i for i in prompt_ids if not 0 <= i < target.vocab_size)
        raise UsageError(f"prompt token {wrong} is outside the vocabulary [0, {target.vocab_size})")
    config = target.model.config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - ROLLS_BACK)
    if kinds or getattr(target.model, "_is_stateful", False):
        raise UsageError(
            f"the target ({config.model_type}) keeps a running state"
            f"{' in its ' + ', '.join(kinds) + ' layers' if kinds else ''} that cannot be rolled "
            "back after a rejected draft, so it cannot be decoded speculatively"
        )
