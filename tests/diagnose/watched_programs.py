"""Programs that know nothing of dflash, a torch that is none, and how tests watch them."""

import os
import subprocess
import sys
from pathlib import Path

from dflash.diagnose.findings import WatchDiagnosis
from dflash.diagnose.verdicts import diagnose_watched
from dflash.diagnose.watch import Plan, Watched, watch

ROOT = Path(__file__).parents[2]
FX = "Detected that you are using FX to symbolically trace a dynamo-optimized function."
CAPTURING = "CUDA error: operation not permitted when stream is capturing"
SMALL_TORCH = '''
"""As much of torch as an observer looks at; GPU 0 has the memory that MEMORY says."""
from types import SimpleNamespace
__version__ = "2.13.0+small"
MEMORY = {}
class CUDAGraph:
    def capture_begin(self, pool=None):
        return pool
cuda = SimpleNamespace(
    CUDAGraph=CUDAGraph, is_initialized=lambda: bool(MEMORY), default_generators=(object(),),
    memory_stats=lambda number: dict(MEMORY),
)
'''
HEALTHY = """
import os, signal, sys, threading, warnings
def state(when):
    names = sorted(thread.name for thread in threading.enumerate())
    print(when, names, sys.path, [p for p in sys.path_importer_cache if "injected" in p])
    print(sorted(set(os.environ.items())), signal.getsignal(signal.SIGUSR1), flush=True)
state("before")
import torch
from torch._dynamo.utils import counters
state("after")
print([type(finder).__name__ for finder in sys.meta_path], "sitecustomize" in sys.modules)
step = torch.compile(lambda x: torch.nn.functional.gelu(x).sum(), backend="aot_eager")
weight = torch.ones(4, requires_grad=True)
for _ in range(3):
    step(weight).backward()
def worker():
    print(step(weight).item())
threads = [threading.Thread(target=worker) for _ in range(2)]
[(thread.start(), thread.join()) for thread in threads]  # lines of both would mix
sys.stderr.write("half a line, \\x1b[31mred\\x1b[0m \\r")
warnings.warn("a warning of its own")
print("graphs", counters["stats"]["unique_graphs"])
sys.stdout.buffer.write(bytes(range(256)))
"""


def written(folder: Path, code: str, *, small_torch: bool = False) -> list[str]:
    """The command that runs *code* as a program in *folder*."""
    (folder / "program.py").write_text(code)
    if small_torch:
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(SMALL_TORCH)
    return [sys.executable, str(folder / "program.py")]


def watched(command: list[str], *, stall_s: float = 300.0, kill_on_stall: bool = False) -> Watched:
    """Watch *command* from this process, its output thrown away."""
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
        plan = Plan(stall_s=stall_s, kill_on_stall=kill_on_stall, stdout=nowhere.fileno())
        return watch(command, plan=plan)


def diagnosed(command: list[str]) -> WatchDiagnosis:
    """What *command* suffered from."""
    return diagnose_watched(watched(command))


def slugs(found: WatchDiagnosis) -> list[str]:
    return [each.slug for each in found.suffered]


def run_cli(*words: str, **options: str) -> subprocess.CompletedProcess[bytes]:
    """``dflash diagnose watch`` with *words*, in a process of its own."""
    command = [sys.executable, "-m", "dflash.cli.__main__", "diagnose", "watch", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options}
    return subprocess.run(command, capture_output=True, check=False, env=environment, timeout=60)
