"""Does another thread's step mark, or its compiled call, end the step of this one?

Inference with ``mode="reduce-overhead"``: a step is a mark, f, then g, and uses f's output after g.
``python docs/measurements/programs/generation_other_thread.py``; needs a GPU and torch alone.
"""

import sys
import threading
from collections.abc import Callable

import torch

if not torch.cuda.is_available():
    sys.exit("needs a CUDA GPU")
X = torch.ones(256, 256, device="cuda")
F, G, OTHERS = (
    torch.compile(function, mode="reduce-overhead")
    for function in (lambda x: (x @ x).sin(), lambda x: (x @ x).cos(), lambda x: (x @ x).tanh())
)


def step(between: Callable[[], object]) -> str:
    """What becomes of f's output if another thread does *between* after f and before g."""
    torch.compiler.cudagraph_mark_step_begin()
    kept, errors = F(X), []
    threading.excepthook = lambda error: errors.append(error.exc_type.__name__)
    thread = threading.Thread(target=torch.no_grad()(between))
    thread.start(), thread.join()
    G(X)
    try:
        right = torch.allclose(kept, (X @ X).sin())
    except RuntimeError as error:
        return f"{str(error).split('.')[0]}; {errors}"
    return f"{'right' if right else 'WRONG'}; {errors}"


with torch.no_grad():
    bodies = {"nothing": lambda: None, "a mark": torch.compiler.cudagraph_mark_step_begin}
    bodies["a compiled call"] = lambda: OTHERS(X)
    sys.stdout.write(f"torch {torch.__version__}\n")
    for name, body in bodies.items():
        found = [step(body) for _ in range(6)]
        sys.stdout.write(f"another thread does {name}: {found[-1]} (of six: {len(set(found))})\n")
