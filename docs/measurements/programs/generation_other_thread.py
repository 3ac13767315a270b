"""Does another thread's step mark, or its compiled call, end the step of this one?

Inference with ``mode="reduce-overhead"``: a step is a mark, f, then g, and uses f's output after g.
In between another thread marks a step, or calls a compiled function that this thread has captured:
from the first step on, or only once f and g are recorded (the fifth). Printed for each of eight
steps: f's output is right, WRONG, or gone, which torch says when it is read. Needs a GPU and torch:

    python docs/measurements/programs/generation_other_thread.py
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

NUM_STEPS, RECORDED = 8, 4
Function = Callable[[torch.Tensor], torch.Tensor]


def step(f: Function, g: Function, between: Callable[[], object]) -> str:
    """What becomes of f's output when *between* happens before g."""
    x = torch.ones(256, 256, device="cuda")
    torch.compiler.cudagraph_mark_step_begin()
    kept = f(x)
    between()
    g(x)
    try:
        return "right" if torch.allclose(kept, (x @ x).sin()) else "WRONG"
    except RuntimeError as error:
        return "gone" if "has been overwritten" in str(error) else repr(error)


def steps(what: str, first: int, other: ThreadPoolExecutor) -> list[str]:
    """Eight steps of newly compiled functions; the other thread does *what* from *first* on."""
    torch.compiler.reset()
    x = torch.ones(256, 256, device="cuda")
    f, g, theirs = (
        torch.compile(function, mode="reduce-overhead")
        for function in (lambda x: (x @ x).sin(), lambda x: (x @ x).cos(), lambda x: x.tanh() + x)
    )
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        theirs(x)
    bodies = {
        "nothing": lambda: None,
        "a mark": torch.compiler.cudagraph_mark_step_begin,
        "a call": torch.no_grad()(lambda: theirs(x)),
    }

    def between() -> None:
        error = other.submit(bodies[what]).exception()
        if error is not None:
            sys.stdout.write(f"the other thread: {error!r}\n")

    return [
        step(f, g, between if number >= first else bodies["nothing"]) for number in range(NUM_STEPS)
    ]


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no CUDA GPU: nothing was run")
    sys.stdout.write(f"torch {torch.__version__}\n")
    with torch.no_grad(), ThreadPoolExecutor(1) as other:
        for what in ("nothing", "a mark", "a call"):
            for first in (0, RECORDED):
                found = " ".join(steps(what, first, other))
                sys.stdout.write(f"the other thread does {what} from step {first} on: {found}\n")
