"""The frozen target: what it is, and the features of a packed batch.

The forward for features runs the embedding and the decoder layers up to the last tap; later
layers, the final norm and the LM head never run. ``Target.model`` is the whole model, untouched,
for decoding with a key-value cache.
"""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import ConfigError
from dflash.target.loading import Loaded, load_causal_lm, resolve_source
from dflash.target.packable import check_packable, rope_theta
from dflash.target.packed import PACKED, attend_within, packed_attention
from dflash.target.sharing import decoder_layers, register_attention, sharing_copy
from dflash.target.taps import check_taps, default_taps

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
PROBE_TOKENS = 8
PROBE_TOLERANCE = 0.02
"""Of the features' root mean square. A sound model gives exactly 0; mixtures of experts round."""

FINGERPRINT_SAMPLES = 64


class Target:
    """A causal LM that never changes, and the layers it is tapped at.

    Attributes:
        model: the transformers model: eval mode, no gradients, the library's own attention.
        tokenizer: its tokenizer.
        device: where it is.
        dtype: of weights and features.
        taps: decoder layers whose outputs are the features, in the order of concatenation.
        num_layers: decoder layers of the whole model.
        hidden_size: D.
        vocab_size: rows of the embedding table, at least as many as the tokenizer has tokens.
        embedding_VD: a view of the model's embedding table.
        lm_head_VD: a view of its LM head; the embedding table where they are tied.
        rope_theta: base of its rotary positions.
        stop_ids: tokens that end an answer.
        fingerprint: sha256 over shape and samples of every weight; equal on any device and dtype.
        lock: for those who must not run the target at the same time.
    """

    def __init__(self, loaded: Loaded, *, taps: Sequence[int] | int, device: str) -> None:
        model: Any = loaded.model
        check_packable(model)
        self.config: Any = model.config.get_text_config(decoder=True)
        self.num_layers = int(self.config.num_hidden_layers)
        self.taps = (
            default_taps(self.num_layers, taps)
            if isinstance(taps, int)
            else check_taps(taps, num_layers=self.num_layers)
        )
        nn.Module.to(model, device)
        if getattr(self.config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # sdpa has no soft-cap, and older versions
            # of transformers drop it without a word
        self.model: Any = model.eval().requires_grad_(requires_grad=False)
        self.tokenizer: Any = loaded.tokenizer
        self.device = torch.device(device)
        self.dtype: torch.dtype = model.dtype
        self.hidden_size = int(self.config.hidden_size)
        self.embedding_VD: Tensor = model.get_input_embeddings().weight
        self.lm_head_VD: Tensor = _lm_head(model, self.embedding_VD)
        self.vocab_size = len(self.embedding_VD)
        self.rope_theta = rope_theta(self.config)
        self.stop_ids = _stop_ids(model, self.tokenizer)
        self.fingerprint = _fingerprint(model, self.config)
        self.lock = threading.Lock()
        self._writing = threading.local()
        self._trunk = self._make_trunk()
        self._probe_documents()

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        taps: Sequence[int] | int,
        device: str,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
    ) -> "Target":
        """Load from a folder (safetensors only), a .gguf file, or "stdlib-lm".

        Args:
            source: what ``target.model`` says.
            taps: the layers, or how many of them to spread over the depth.
            device: "cpu" or "cuda:N".
            dtype: bfloat16 or float32; weights stored in another dtype are converted.
            trust_remote_code: run Python code that the folder brings along.

        Raises:
            MissingError: no such model, no weights in safetensors, or no gguf package.
            ConfigError: not a causal LM, not packable, impossible taps, or dtype float16.
        """
        if dtype not in {torch.bfloat16, torch.float32}:
            raise ConfigError(
                f"target.dtype must be bf16 or fp32, got {dtype}: in fp16 the features of large "
                "models overflow where the drafter fuses them",
                hint="fp16 weights are converted to bf16 on loading",
            )
        path = resolve_source(source)
        loaded = load_causal_lm(path, dtype=dtype, trust_remote_code=trust_remote_code)
        return cls(loaded, taps=taps, device=device)

    @torch.no_grad()
    def features(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        documents_T: Tensor,
        *,
        cu_lengths: Sequence[int],
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the tapped hidden states of a packed batch, on the current stream.

        Args:
            tokens_T: int64, token ids; any valid id in the padding tail.
            positions_T: int64, position within the document.
            documents_T: int64; not read, the host offsets say the same without a sync.
            cu_lengths: offsets of the documents, 0 first, T last, the padding tail included.
            out: [T, C] to write into.

        Returns:
            [T, C]: for each position the outputs of the taps, in their order.
        """
        del documents_T
        num_tokens = len(tokens_T)
        if cu_lengths[0] != 0 or cu_lengths[-1] != num_tokens:
            raise ValueError(f"cu_lengths must run from 0 to {num_tokens}, got {list(cu_lengths)}")
        if out is None:
            width = len(self.taps) * self.hidden_size
            out = torch.empty(num_tokens, width, dtype=self.dtype, device=self.device)
        self._writing.out_TC = out
        try:
            with attend_within(cu_lengths, self.device) as documents:
                self._trunk(
                    input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False
                )
        finally:
            del self._writing.out_TC
        if documents.num_calls != max(self.taps) + 1:
            raise ConfigError(
                f"target.model: {max(self.taps) + 1} layers of {type(self.model).__name__} ran, "
                f"but {documents.num_calls} attended, so documents may have read each other"
            )
        return out

    def _make_trunk(self) -> Any:  # noqa: ANN401 (a transformers model)
        """Return the base model cut after the last tap; it shares all weights."""
        register_attention(PACKED, packed_attention)
        trunk = sharing_copy(self.model.get_decoder(), attention=PACKED)
        name, layers = decoder_layers(trunk) or ("", nn.ModuleList())
        setattr(trunk, name, layers[: max(self.taps) + 1])
        trunk.config.num_hidden_layers = max(self.taps) + 1
        for norm in FINAL_NORMS:
            if isinstance(getattr(trunk, norm, None), nn.Module):
                setattr(trunk, norm, nn.Identity())
        for order, tap in enumerate(self.taps):
            getattr(trunk, name)[tap].register_forward_hook(self._writer(order))
        return trunk

    def _writer(self, order: int) -> Any:  # noqa: ANN401 (a forward hook)
        columns = slice(order * self.hidden_size, (order + 1) * self.hidden_size)

        def write(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            hidden = output if isinstance(output, Tensor) else output[0]
            self._writing.out_TC[:, columns].copy_(hidden[0])

        return write

    def _probe_documents(self) -> None:
        """Run two documents, change the first, and see that the second does not move.

        Raises:
            ConfigError: it did; some layer mixes tokens in a way that config and class do not show.
        """
        tokens = torch.arange(2 * PROBE_TOKENS, device=self.device) % self.vocab_size
        other = tokens.clone()
        other[:PROBE_TOKENS] = tokens[:PROBE_TOKENS].flip(0)
        positions = torch.arange(PROBE_TOKENS, device=self.device).repeat(2)
        bounds = [0, PROBE_TOKENS, 2 * PROBE_TOKENS]
        one, two = (
            self.features(ids, positions, positions, cu_lengths=bounds)[PROBE_TOKENS:].float()
            for ids in (tokens, other)
        )
        moved, scale = (one - two).abs().max().item(), one.square().mean().sqrt().item()
        if not moved <= PROBE_TOLERANCE * scale:
            raise ConfigError(
                f"target.model: in {type(self.model).__name__} a document reads the one packed "
                f"before it (features moved by {moved:.3g} at a scale of {scale:.3g})",
                hint="train with a target that has plain or sliding attention in every layer",
            )


def _lm_head(model: Any, embedding_VD: Tensor) -> Tensor:  # noqa: ANN401
    head = model.get_output_embeddings()
    if head is None:
        return embedding_VD
    weight_VD: Tensor = head.weight
    if getattr(head, "bias", None) is not None or weight_VD.shape != embedding_VD.shape:
        raise ConfigError(
            f"target.model: the LM head of {type(model).__name__} has a bias, or other rows than "
            "its embedding table; a drafter shares both and knows neither difference"
        )
    return weight_VD


def _stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:  # noqa: ANN401
    found: set[int] = set()
    for owner in (model.generation_config, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(found))


def _fingerprint(model: Any, config: Any) -> str:  # noqa: ANN401
    """Hash facts that no library version rewrites, and samples rounded to bf16."""
    names = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    digest = hashlib.sha256(repr([getattr(config, name, None) for name in names]).encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.reshape(-1)
        step = max(1, len(flat) // FINGERPRINT_SAMPLES)
        sample = flat[::step][:FINGERPRINT_SAMPLES].to(torch.bfloat16).float().cpu()
        digest.update(f"{name} {list(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()
