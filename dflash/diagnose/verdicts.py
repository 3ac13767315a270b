"""What a watched program suffered from, by the detectors of the failure modes.

A run of ours is known to be threaded, sealed and made ready. Of a stranger's program nothing is
known, and some messages have harmless causes there, so that a failure mode is shown no more of it
than can only be its own: ``EVIDENCE``. What it cannot see is in docs/diagnose.md.
"""

import re
import signal
from collections.abc import Callable, Iterator

from dflash.diagnose.aftermath import what_it_suffered
from dflash.diagnose.findings import WatchDiagnosis, WatchedProcess
from dflash.diagnose.finished import FinishedRun
from dflash.diagnose.observed import Failed, Observed
from dflash.diagnose.watch import Watched

SHELLS_SIGNAL = 128
"""A shell, and whoever copies it, ends with this and the number of the signal of its program."""
THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
SEGMENTATION = "Fatal Python error: Segmentation fault"
TRACEBACK = "Traceback (most recent call last):"


def diagnose_watched(watched: Watched) -> WatchDiagnosis:
    """Name what a program that was watched to its end suffered from."""
    return WatchDiagnosis(
        **watched.end,
        suffered=what_it_suffered(lambda slug: evidence_for(slug, watched)),
        processes=[_facts(process) for process in watched.processes],
        notes=list(_notes(watched)),
    )


def evidence_for(slug: str, watched: Watched) -> FinishedRun:
    """What the detector of *slug* is shown of a program."""
    if slug in EVIDENCE:
        return FinishedRun(text="\n".join(EVIDENCE[slug](watched)))
    processes = watched.processes
    texts = [watched.stderr, *(failed.text for one in processes for failed in one.failed)]
    return FinishedRun(
        text="\n".join(texts),
        watched=tuple(interval for one in processes for interval in one.news()),
        num_skipped=sum(one.last.skipped for one in processes),
    )


def _beside_a_capture(watched: Watched) -> Iterator[str]:
    """What ended a thread while another one captured: alone, an operation may not be captured."""
    for process in watched.processes:
        for failed in process.failed:
            if process.last.captures.keys() - {failed.thread}:
                yield failed.text


def _in_a_worker(watched: Watched) -> Iterator[str]:
    """What ended another thread than the main one, which knows what it has set itself."""
    yield from (one.text for one in _failures(watched) if one.thread and not one.is_main)


def _not_tracing_itself(watched: Watched) -> Iterator[str]:
    """What was raised where the thread itself traces nothing: ``torch.fx`` may not be used so."""
    yield from (one.text for one in _failures(watched) if "_symbolic_trace.py" not in one.text)


def _at_a_stall(watched: Watched) -> Iterator[str]:
    """The stacks of a program that stood still."""
    yield from (stall.stacks for stall in watched.stalls)
    if watched.ended_for_stall:
        yield watched.stderr[_fatal(watched) :]


def _where_threads_compile(watched: Watched) -> Iterator[str]:
    """Failed imports, and a crash of which two threads at least were in the compiler."""
    yield from (one.text for one in _failures(watched))
    crash = watched.stderr[_fatal(watched) :]
    compiling = sum("torch/_dynamo/" in thread for thread in THREAD.split(crash)[1:])
    if watched.code in (-signal.SIGSEGV, SHELLS_SIGNAL + signal.SIGSEGV) and compiling > 1:
        yield crash


EVIDENCE: dict[str, Callable[[Watched], Iterator[str]]] = {
    "capture-race": _beside_a_capture,
    "compile-deadlock": _at_a_stall,
    "first-compile-crash": _where_threads_compile,
    "fx-trace-race": _not_tracing_itself,
    "rng-in-capture": _beside_a_capture,
    "worker-config-lost": _in_a_worker,
}


def _fatal(watched: Watched) -> int:
    """Where the stacks of the program's end begin in what it wrote."""
    place = watched.stderr.rfind("Fatal Python error:")
    return len(watched.stderr) if place < 0 else place


def _failures(watched: Watched) -> Iterator[Failed]:
    """Exceptions that ended threads, then those that the program printed; of these no thread."""
    for process in watched.processes:
        yield from process.failed
    yield from (Failed(thread=None, is_main=False, text=t) for t in _tracebacks(watched.stderr))


def _tracebacks(text: str) -> Iterator[str]:
    block: list[str] = []
    for line in text.splitlines():
        if TRACEBACK in line:
            block = [line]
        elif block:
            block.append(line)
            if line.strip() and not line.startswith((" ", "\t")):  # the exception itself
                yield "\n".join(block)
                block = []


def _facts(process: Observed) -> WatchedProcess:
    last = process.last
    return WatchedProcess(
        pid=process.pid,
        argv=process.argv,
        python=process.python,
        torch=process.torch,
        compiled_graphs=last.compiled,
        recompiled_frames=last.recompiled,
        skipped_graphs=last.skipped,
        captures=last.captures,
        memory=last.memory,
    )


def _notes(watched: Watched) -> Iterator[str]:
    """How it ended, and what was not seen."""
    if watched.ended_for_stall:
        yield "it was ended because it stood still"
    elif watched.stalls:
        times = ", ".join(f"{stall.at_s:.0f} s" for stall in watched.stalls)
        yield f"it stood still after {times}"
    for name in dict.fromkeys(watched.signals):
        yield f"{name} was passed on to it"
    if watched.left_behind:
        yield "processes that it had left behind were ended"
    if watched.lost_bytes:
        yield f"{watched.lost_bytes} bytes in the middle of its stderr were not looked at"
    for process in watched.processes:
        for error in dict.fromkeys(process.broken):
            yield f"process {process.pid} could not be counted: {error}"
    if not any(process.torch for process in watched.processes):
        yield "no process of it that could be observed imported torch: only its stderr was read"
