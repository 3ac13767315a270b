"""Reading one GGUF file: weights dequantised into a plain model, tokenizer as its metadata says.

transformers reads the parts. What it does with them differs between versions (5 asks for another
package, 4.57 mistakes the end-of-text token and prepends one), so that is decided here.
"""

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash.errors import MissingError

SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of special tokens in transformers and in GGUF metadata."""


def require_gguf(path: Path) -> None:
    """Raise a MissingError where the gguf package is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingError(
            f"{path} is a GGUF file, and the gguf package is not installed",
            hint="pip install 'dflash-trainer[gguf]'",
        )


def gguf_numbers(path: Path) -> dict[str, int]:
    """Return the single numbers of the file's tokenizer metadata; slow, so read once."""
    import gguf

    return {
        key.removeprefix("tokenizer.ggml."): int(field.parts[field.data[0]][0])
        for key, field in gguf.GGUFReader(path).fields.items()
        if key.startswith("tokenizer.ggml.") and key.endswith(("_token_id", "_token"))
    }


def gguf_model(path: Path, dtype: torch.dtype, *, numbers: dict[str, int]) -> tuple[Any, list[str]]:
    """Return the causal LM and the names of weights that the file lacks."""
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    auto: Any = transformers.AutoModelForCausalLM
    reader: Any = modeling_gguf_pytorch_utils
    config = transformers.AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    for kind, token_id in _special_ids(numbers).items():
        setattr(config, f"{kind}_token_id", token_id)
    with torch.device("meta"):
        names = auto.from_config(config)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        read = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)
    model = auto.from_config(config, dtype=dtype)
    weights = {name: tensor.to(dtype) for name, tensor in read["tensors"].items()}
    report = nn.Module.load_state_dict(model, weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return model, sorted(set(report.missing_keys) - tied)


def gguf_tokenizer(path: Path, *, numbers: dict[str, int]) -> Any:  # noqa: ANN401 (transformers is untyped)
    """Return the tokenizer with the special tokens of the metadata, and no others."""
    import transformers

    read = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    tokens = {
        f"{kind}_token": read.convert_ids_to_tokens(token_id)
        for kind, token_id in _special_ids(numbers).items()
    }
    inner = read.backend_tokenizer
    if not numbers.get("add_bos_token"):
        _prepend_nothing(inner)
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=inner, **tokens)
    tokenizer.chat_template = read.chat_template
    return tokenizer


def _prepend_nothing(inner: Any) -> None:  # noqa: ANN401 (a tokenizers.Tokenizer)
    from tokenizers import processors

    with_start, without = (inner.encode("a", add_special_tokens=on).ids for on in (True, False))
    if with_start != without:
        inner.post_processor = processors.ByteLevel(trim_offsets=False)


def _special_ids(numbers: dict[str, int]) -> dict[str, int]:
    found = {kind: numbers.get(f"{name}_token_id") for kind, name in SPECIAL_TOKENS.items()}
    return {kind: token_id for kind, token_id in found.items() if token_id is not None}
