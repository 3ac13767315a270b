"""One compile cache, two programs of one graph: one has a static input, one gets new tensors.

    python static_inputs.py

Needs nothing but torch (up to 2.12, to see it) and one CUDA GPU, and takes a minute. Each program
trains 20 steps with torch.compile(mode="reduce-overhead") in a process of its own. Printed of each:
how often the cache had its code, the CUDA graphs that it captured, and what it reserved. Right is
the same for "new tensors" whatever the cache holds.

What torch does: the key of its AOTAutograd cache leaves out which inputs are static. The second
program is given the first's code, and captures a graph anew wherever a static input has moved.
"""

import os
import subprocess
import sys
import tempfile

import torch

ORDERS = (("new tensors",), ("static", "new tensors"), ("new tensors", "static"))


def train(kind: str) -> None:
    captured, begin = [], torch.cuda.CUDAGraph.capture_begin
    torch.cuda.CUDAGraph.capture_begin = lambda *of, **how: captured.append(begin(*of, **how))
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()).cuda()
    model.append(torch.nn.Linear(1024, 1024, device="cuda"))
    step = torch.compile(lambda x: model(x).square().mean(), mode="reduce-overhead")
    batches = [torch.randn(8192, 1024, device="cuda") for _ in range(20)]
    if kind == "static":
        torch._dynamo.mark_static_address(batches[0], guard=False)
        batches = batches[:1] * 20
    for x in batches:
        torch.compiler.cudagraph_mark_step_begin()
        step(x).backward()
        model.zero_grad(set_to_none=True)
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    reserved = f"{torch.cuda.memory_reserved() / 2**30:.2f} GiB"
    print(f"  {kind}: cache hits {hits}, graphs {len(captured)}, {reserved}", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no CUDA GPU: nothing was run")
    for kind in sys.argv[1:]:
        train(kind)
    for order in ORDERS if len(sys.argv) == 1 else ():
        print("a cache of their own:", flush=True)
        with tempfile.TemporaryDirectory() as cache:
            shared = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            for kind in order:
                subprocess.run([sys.executable, __file__, kind], env=shared, check=True)
