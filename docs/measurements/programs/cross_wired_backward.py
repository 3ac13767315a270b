"""Two trainer threads, one torch.compile(mode="reduce-overhead"): whose graphs run whose backward?

    python cross_wired_backward.py

Needs nothing but torch (2.13 or later, to see it) and one CUDA GPU, and takes half a minute. Two
threads train with one compiled module, first in turn, then at once. Printed of each: in which tree
managers (one holds the CUDA graphs and the memory of a thread) its forward and backward passes have
run so far; and how far its gradients are from eager ones, relative to these, or what it died of.
Right is one manager for both passes, a thread's own, and an error of rounding (TF32 is off).

What torch does: ``compile_fx.cudagraphify`` binds a graph to a manager once a thread, and all
backward passes of a GPU run in its one autograd thread: in the manager of whoever came first. That
thread is given what the caller of ``backward`` stashed, which is how a pass is told to be whose.
"""

import threading

import torch
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

MODEL = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
BOTH, TURN = threading.Barrier(2), threading.Lock()


def noted(manager, inputs, function_id, run=CUDAGraphTreeManager.run):
    torch._C._get_obj_in_tls("seen").add(f"{manager.id_to_mode[function_id].name} in {id(manager)}")
    return run(manager, inputs, function_id)


def gradients(call, x, weights):
    torch.compiler.cudagraph_mark_step_begin()
    return torch.cat([g.flatten() for g in torch.autograd.grad(call(x).square().mean(), weights)])


def train(trainer):
    torch._C._stash_obj_in_tls("seen", seen := set())
    x, weights = torch.randn(1024, 1024, device="cuda"), tuple(MODEL.parameters())
    eager = gradients(MODEL.forward, x, weights)
    for phase, turn, steps in (("in turn", TURN, 5), ("at once", threading.Lock(), 100)):
        BOTH.wait()
        try:
            with turn:
                off = [gradients(MODEL, x, weights).dist(eager) for _ in range(steps)]
            told = f"gradients off by {torch.stack(off).max() / eager.norm():.1e}"
        except Exception as error:
            told = f"died of {error!r}"
        print(f"{phase}: trainer {trainer}: {sorted(seen)}: {told}", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no CUDA GPU: nothing was run")
    CUDAGraphTreeManager.run = noted
    MODEL.cuda().compile(mode="reduce-overhead", dynamic=False)
    [threading.Thread(target=train, args=(trainer,)).start() for trainer in "AB"]
