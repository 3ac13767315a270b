"""Runs failure modes in child processes and judges what came back; reads finished runs.

The parent never touches a CUDA context: whatever a failure does to a process, it does to a child.
Nothing is imported here, since the command line's help must not wait for torch.
"""
