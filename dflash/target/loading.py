"""Reading a causal LM from disk: a folder with safetensors, or one GGUF file. Never from a hub."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dflash.errors import ConfigError, MissingError

STDLIB_LM = "stdlib-lm"
REMOTE_CODE_HINT = "if you trust it, set target.trust_remote_code = true"


class Loaded(NamedTuple):
    """A transformers causal LM on the CPU, in the dtype asked for, and its tokenizer."""

    model: Any
    tokenizer: Any


def resolve_source(source: str | Path) -> Path:
    """Return the path that ``target.model`` means; "stdlib-lm" is the shipped target.

    Raises:
        MissingError: there is no such file or folder.
    """
    if str(source) == STDLIB_LM:
        shipped = Path(__file__).parent / "stdlib_lm"
        if not shipped.is_dir():
            raise MissingError(
                "the shipped target stdlib-lm is not part of this installation",
                hint="build it: python -m dflash.target.stdlib_lm_build --out FOLDER",
            )
        return shipped
    path = Path(source)
    if not path.exists():
        raise MissingError(
            f"target.model = {str(source)!r}: there is no such file or folder",
            hint="models are read from disk only; download it first",
        )
    return path


def load_causal_lm(path: Path, *, dtype: torch.dtype, trust_remote_code: bool) -> Loaded:
    """Read a model and its tokenizer.

    Raises:
        MissingError: weights, tokenizer or the gguf extra are missing.
        ConfigError: what is there cannot be read as a causal LM.
    """
    with _no_progress_bars():
        if path.is_dir():
            return _from_folder(path, dtype, trust_remote_code=trust_remote_code)
        if path.suffix == ".gguf":
            return _from_gguf(path, dtype)
    raise ConfigError(
        f"target.model = {str(path)!r} is neither a folder nor a .gguf file",
        hint="name the folder that holds config.json and *.safetensors",
    )


def _from_folder(path: Path, dtype: torch.dtype, *, trust_remote_code: bool) -> Loaded:
    import transformers

    if not (path / "config.json").is_file():
        raise MissingError(f"{path} holds no config.json, so it is not a model folder")
    if not any(path.glob("*.safetensors")):
        raise MissingError(
            f"{path} holds no *.safetensors; other weight formats are not read",
            hint="save the model with safe_serialization=True",
        )
    with _explained(path):
        auto: Any = transformers.AutoModelForCausalLM
        model, report = auto.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    _refuse_missing(path, report["missing_keys"])
    return Loaded(model, tokenizer)


def _from_gguf(path: Path, dtype: torch.dtype) -> Loaded:
    """Dequantise into a plain model; needs no accelerate, unlike transformers' own loader."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingError(
            f"{path} is a GGUF file, and the gguf package is not installed",
            hint="pip install 'dflash-trainer[gguf]'",
        )
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    auto: Any = transformers.AutoModelForCausalLM
    reader: Any = modeling_gguf_pytorch_utils
    with _explained(path):
        config = transformers.AutoConfig.from_pretrained(path.parent, **where)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
        with torch.device("meta"):
            names = auto.from_config(config)
        read = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)
        model = auto.from_config(config, dtype=dtype)
        weights = {name: tensor.to(dtype) for name, tensor in read["tensors"].items()}
        report = nn.Module.load_state_dict(model, weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _refuse_missing(path, sorted(set(report.missing_keys) - tied))
    return Loaded(model, tokenizer)


def _refuse_missing(path: Path, keys: Any) -> None:  # noqa: ANN401 (list or set, by version)
    if keys:
        first = min(keys)
        raise ConfigError(
            f"{path} lacks {len(keys)} of the model's weights, first {first}",
            hint="the file is incomplete or of another architecture than its config says",
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what transformers raises about a folder's content into one sentence."""
    try:
        yield
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        remote = "trust_remote_code" in str(error)
        hint = REMOTE_CODE_HINT if remote else "check the folder with transformers itself"
        what = "brings code of its own" if remote else f"cannot be read as a causal LM: {first}"
        raise ConfigError(f"target.model: {path} {what.rstrip('.')}", hint=hint) from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
