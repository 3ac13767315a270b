"""Reading a causal LM from disk: a folder with safetensors, or one GGUF file. Never from a hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash.errors import ConfigError, DflashError, MissingError
from dflash.target.gguf_file import gguf_model, gguf_numbers, gguf_tokenizer, require_gguf

STDLIB_LM = "stdlib-lm"
KEY = "target.model"
SET_TRUST = "set target.trust_remote_code = true"
REMOTE_CODE_HINT = f"if you trust it, {SET_TRUST}"


class Loaded(NamedTuple):
    """A transformers causal LM on the CPU, in the dtype asked for, and its tokenizer."""

    model: Any
    tokenizer: Any


@contextmanager
def called(name: str, *, trust: str = "--trust-remote-code", elsewhere: str = "") -> Iterator[None]:
    """Let errors inside that speak of the key ``target.model`` speak of *name*, where a model comes
    from an option or from a checkpoint.

    Args:
        trust: the option with which its own code is run; "" where there is none.
        elsewhere: what else to do about a model that is not there.

    Raises:
        DflashError: of the same kind.
    """
    try:
        yield
    except DflashError as error:
        give = f"give {trust}" if trust else "load it with a command that has --trust-remote-code"
        hint = error.hint.replace(SET_TRUST, give).replace(KEY, name)
        if elsewhere and isinstance(error, MissingError):
            hint = f"{hint}, or {elsewhere}" if hint else elsewhere
        raise type(error)(error.what.replace(KEY, name), hint=hint) from error


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


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:  # noqa: ANN401
    """Read the tokenizer alone, of a model folder or a .gguf file.

    Raises:
        MissingError: the gguf package is not installed.
        ConfigError: no tokenizer can be read there.
    """
    import transformers

    if path.suffix == ".gguf":
        require_gguf(path)
        with _explained(path):
            return gguf_tokenizer(path, numbers=gguf_numbers(path))
    with _explained(path):
        return transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
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
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    _refuse_missing(path, report["missing_keys"])
    return Loaded(model, tokenizer)


def _from_gguf(path: Path, dtype: torch.dtype) -> Loaded:
    require_gguf(path)
    with _explained(path):
        numbers = gguf_numbers(path)
        tokenizer = gguf_tokenizer(path, numbers=numbers)
        model, missing = gguf_model(path, dtype, numbers=numbers)
    _refuse_missing(path, missing)
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
        what = "brings code of its own" if remote else f"cannot be read: {first}"
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
