"""``dflash data``: prepare token shards, look at them, let the target write conversations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli.interrupts import sigterm_is_ctrl_c
from dflash.cli.output import check_folder, print_json, print_table, talk
from dflash.errors import UsageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dflash.data.preview import PreviewRow
    from dflash.data.shards import TokenDataset
    from dflash.data.synthesis import Synthesis, SynthesisSettings
    from dflash.target.model import Target

data_app = typer.Typer(
    no_args_is_help=True,
    help="Prepare, inspect and synthesize training data.",
    add_completion=False,
)

Sources = Annotated[
    list[str],
    typer.Argument(help="JSONL, parquet or text files, folders, stdlib:train|heldout|all"),
]
TokenizerFolder = Annotated[
    str, typer.Option("--tokenizer", help="the target's folder, or stdlib-lm")
]
MaxDocumentTokens = Annotated[
    int, typer.Option(min=3, help="longer text is split, longer conversations are cut")
]
VocabSize = Annotated[
    int | None, typer.Option(min=1, help="rows of the embedding table; default: the folder's")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON value")]


@data_app.command()
def prepare(
    sources: Sources,
    *,
    tokenizer: TokenizerFolder,
    out: Annotated[Path, typer.Option(help="the folder to write")],
    max_document_tokens: MaxDocumentTokens = 4096,
    max_bad_share: Annotated[
        float, typer.Option(min=0, max=1, help="stop above this share of bad rows")
    ] = 0.01,
    vocab_size: VocabSize = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise sources once: token shards with a loss mask, and a manifest of what was dropped."""
    check_folder(out, replaced=True)
    from dflash.data.prepare import prepare as prepare_dataset
    from dflash.data.prepare import require_ours

    require_ours(out)
    loaded = _load_tokenizer(tokenizer)
    with sigterm_is_ctrl_c():
        dataset = prepare_dataset(
            sources,
            out,
            tokenizer=loaded,
            max_document_tokens=max_document_tokens,
            max_bad_share=max_bad_share,
            vocab_size=vocab_size or _vocab_size(tokenizer, loaded),
        )
    talk(f"{out}: {len(dataset)} rows")
    _print_summary(dataset, as_json=as_json, rows=[])


@data_app.command()
def inspect(
    sources: Sources,
    *,
    tokenizer: TokenizerFolder,
    rows: Annotated[int, typer.Option(min=0, help="how many rows to show")] = 3,
    seed: Annotated[int, typer.Option(help="which rows to show")] = 0,
    max_document_tokens: MaxDocumentTokens = 4096,
    vocab_size: VocabSize = None,
    as_json: AsJson = False,
) -> None:
    """Show rows with their supervised tokens marked, then counts. SOURCES may be prepared data."""
    import tempfile

    from dflash.data.prepare import prepare as prepare_dataset
    from dflash.data.preview import preview_rows

    loaded = _load_tokenizer(tokenizer)
    with tempfile.TemporaryDirectory(prefix="dflash-inspect-") as folder:
        dataset = prepare_dataset(
            sources,
            Path(folder, "prepared"),
            tokenizer=loaded,
            max_document_tokens=max_document_tokens,
            max_bad_share=1.0,  # the point is to see the bad ones
            vocab_size=vocab_size or _vocab_size(tokenizer, loaded),
        )
        shown = preview_rows(dataset, loaded, num_rows=rows, seed=seed)
        _print_summary(dataset, as_json=as_json, rows=shown)


@data_app.command()
def synthesize(  # noqa: PLR0913  # one option each
    *,
    target: Annotated[str, typer.Option(help="the target's folder or GGUF file, or stdlib-lm")],
    out: Annotated[Path, typer.Option(help="the folder of JSONL shards")],
    num: Annotated[int, typer.Option(min=1, help="conversations that the folder is to hold")],
    batch_size: Annotated[int, typer.Option(min=1, help="conversations sampled together")] = 64,
    max_user_tokens: Annotated[int, typer.Option(min=1, help="length of a user turn")] = 128,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="length of an answer")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token")] = 1.0,
    answer_temperature: Annotated[
        float | None, typer.Option(min=0, help="of answers, if other than of user turns")
    ] = None,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="nucleus of the sampling")] = 1.0,
    seed: Annotated[int, typer.Option(help="decides all text")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0, ...")] = "auto",
    text: Annotated[
        list[str] | None, typer.Option(help="text files that user turns may begin with")
    ] = None,
    text_share: Annotated[
        float, typer.Option(min=0, max=1, help="share of user turns begun from --text")
    ] = 0.0,
    not_in: Annotated[
        list[Path] | None,
        typer.Option(help="folders of other conversations whose user turns must not recur"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let the target write conversations to learn from. Running again goes on where it ended."""
    given = locals()
    check_folder(out, replaced=False)
    from dflash.data.synthesis import require_own
    from dflash.data.synthesize import synthesize as write_conversations
    from dflash.target.sample import SampleBatches

    require_own(out)
    lines = _text_lines(text or [])
    if text_share and not lines:
        raise UsageError("--text-share needs --text", hint="name a text file or folder")
    with _called("--target"):
        loaded = _load_target(target, device)
    written = write_conversations(
        SampleBatches(loaded),
        out,
        tokenizer=loaded.tokenizer,
        num_rows=num,
        settings=_settings(given, loaded, lines),
        text_lines=lines,
        not_in=not_in or [],
        on_shard=lambda state: talk(f"{state.num_rows} of {num} conversations"),
    )
    _print_synthesis(written, out, as_json=as_json)


def _settings(given: dict[str, Any], target: "Target", lines: list[str]) -> "SynthesisSettings":
    """What decides the text, of the command's options by name, the target and the lines."""
    from dflash.data.synthesis import SynthesisSettings
    from dflash.data.synthesize import text_digest

    names = ("batch_size", "max_user_tokens", "max_answer_tokens", "temperature", "top_p", "seed")
    of_answers = given["answer_temperature"]
    return SynthesisSettings(
        source=target.fingerprint,
        stop_ids=tuple(target.stop_ids),
        answer_temperature=given["temperature"] if of_answers is None else of_answers,
        text_share=given["text_share"],
        text_sha256=text_digest(lines),
        **{name: given[name] for name in names},
    )


def _load_target(source: str, device: str) -> Any:  # noqa: ANN401  # avoids importing torch for --help
    import torch

    from dflash.execution import use_device
    from dflash.target.model import Target

    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
        use_device(place)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        first = str(error).splitlines()[0]
        raise UsageError(
            f"--device {device}: cannot be used ({first})", hint="dflash env lists what is there"
        ) from error
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    return Target.load(source, taps=1, device=device, dtype=dtype)


def _load_tokenizer(source: str) -> Any:  # noqa: ANN401  # transformers is untyped
    from dflash.target.loading import load_tokenizer, resolve_source

    with _called("--tokenizer"):
        return load_tokenizer(resolve_source(source))


def _called(option: str) -> "AbstractContextManager[None]":
    from dflash.target.loading import called

    return called(option, trust="")


def _vocab_size(source: str, tokenizer: Any) -> int:  # noqa: ANN401  # transformers is untyped
    """Return the rows of the target's embedding table, or what the tokenizer can say."""
    from transformers import AutoConfig

    folder, where = _where(source)
    try:
        config = AutoConfig.from_pretrained(folder, **where)
        return int(config.get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError):  # a folder with nothing but a tokenizer
        return len(tokenizer)


def _where(source: str) -> tuple[Path, dict[str, Any]]:
    from dflash.target.loading import resolve_source

    path = resolve_source(source)
    if path.is_dir():
        return path, {"local_files_only": True}
    return path.parent, {"local_files_only": True, "gguf_file": path.name}


def _text_lines(sources: list[str]) -> list[str]:
    from dflash.data.sources import find_sources

    return [
        line
        for file in (find_sources(sources) if sources else [])
        for line in file.path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]


def _print_summary(dataset: "TokenDataset", *, as_json: bool, rows: list["PreviewRow"]) -> None:
    from dataclasses import asdict

    from dflash.data.preview import summary

    found = summary(dataset)
    if as_json:
        print_json({**found, "rows": [asdict(row) for row in rows]} if rows else found)
        return
    for row in rows:
        _print_row(row)
    names = ("num_rows_read", "num_dropped_rows", "num_rows", "num_tokens")
    more = ("num_supervised_tokens", "num_cut_rows", "num_cut_tokens", "num_unsupervised_turns")
    counts = [(name.removeprefix("num_").replace("_", " "), f"{found[name]}") for name in names]
    counts.append(("supervised share", f"{found['supervised_share']:.1%}"))
    counts += [(name.removeprefix("num_").replace("_", " "), f"{found[name]}") for name in more]
    print_table(("count", "value"), counts)
    if found["dropped"]:
        _print_dropped(found)
    print()
    most = max(entry["num_rows"] for entry in found["length_histogram"])
    print_table(
        ("tokens", "rows", ""),
        [
            (
                f"{e['first']}-{e['last']}",
                f"{e['num_rows']}",
                "#" * round(40 * e["num_rows"] / most),
            )
            for e in found["length_histogram"]
        ],
    )


def _print_dropped(found: dict[str, Any]) -> None:
    print()
    print_table(("dropped because", "rows"), [(k, f"{n}") for k, n in found["dropped"].items()])
    print()
    listed = [(row["place"], row["detail"]) for row in found["dropped_rows"]]
    print_table(("dropped row", "why"), listed)


def _print_row(row: "PreviewRow") -> None:
    """Colour supervised text on a terminal; put it in brackets elsewhere."""
    import sys

    heading = f"{row.place} ({row.num_tokens} tokens)"
    if not sys.stdout.isatty():
        print(f"--- {heading}")
        print("".join(f"⟦{run.text}⟧" if run.supervised else run.text for run in row.runs))
        print()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.rule(Text(heading))
    body = Text()
    for run in row.runs:
        body.append(run.text, style="bold green" if run.supervised else "dim")
    console.print(body)


def _print_synthesis(written: "Synthesis", out: Path, *, as_json: bool) -> None:
    drawn = sum(shard.num_drawn for shard in written.shards)
    result = {
        "out": str(out),
        "num_rows": written.num_rows,
        "num_drawn": drawn,
        "num_shards": len(written.shards),
        "dropped": dict(written.dropped),
    }
    if as_json:
        print_json(result)
        return
    counts = [("conversations", f"{written.num_rows}"), ("drawn", f"{drawn}")]
    print_table(("count", "value"), [*counts, *((k, f"{n}") for k, n in written.dropped.items())])
