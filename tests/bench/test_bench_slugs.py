"""How a process ended is told by the failure mode that the pages know it as."""

import pytest

from dflash_bench.slugs import slug_of
from dflash_bench.subjects import Failure

TREES = (
    'File "torch/_inductor/cudagraph_trees.py", line 294, in get_obj\n    assert x\nAssertionError'
)
REFUSED = (
    "thread drafter-1 cannot capture on torch 2.11: get_obj in torch/_inductor/cudagraph_trees.py"
    " fails a bare assertion"
)
CHURN = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of"
    " which 1.00 GiB is free. Of the allocated memory 40.00 GiB is allocated by PyTorch, and 90.00"
    " GiB is reserved by PyTorch but unallocated."
)
DEADLOCK = "Thread 1:\n  in create_fw_bw_graph\nThread 2:\n  in compile_fx_backward\n"


@pytest.mark.parametrize(
    ("kind", "message", "trace", "slug"),
    [
        ("AssertionError", "", TREES, "cudagraph-trees"),
        ("CaptureError", REFUSED, "", "cudagraph-trees"),
        (
            "RuntimeError",
            "Error: accessing tensor output of CUDAGraphs that has been overwritten by a run",
            "",
            "missing-step-mark",
        ),
        (
            "RuntimeError",
            "Offset increment outside graph capture encountered unexpectedly.",
            "",
            "rng-in-capture",
        ),
        (
            "RuntimeError",
            "Detected that you are using FX to symbolically trace a dynamo-optimized function.",
            "",
            "fx-trace-race",
        ),
        (
            "AcceleratorError",
            "CUDA error: operation not permitted when stream is capturing",
            "",
            "capture-race",
        ),
        (
            "SealedError",
            'part "normal" would compile again in thread drafter-0 after the program was sealed',
            "",
            "late-shape",
        ),
        ("Hang", "no answer within 300 s", DEADLOCK, "compile-deadlock"),
        ("OutOfMemoryError", CHURN, "", "allocator-churn"),
        ("OutOfMemoryError", CHURN.replace("90.00", "2.00"), "", ""),
        ("OutOfMemoryError", CHURN.replace("90.00 GiB", "900.00 MiB"), "", ""),
        ("ValueError", "a tensor of the wrong shape", "", ""),
        ("ProcessDied", "killed by SIGKILL", "", ""),
    ],
)
def test_a_failure_has_the_slug_of_its_page(
    *, kind: str, message: str, trace: str, slug: str
) -> None:
    assert slug_of(Failure(kind, message, "turn", trace)) == slug
