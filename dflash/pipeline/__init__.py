"""The threads: loader, target workers, drafter workers, and the supervisor that owns them.

Rings carry slot numbers, never tensors: every buffer is allocated once, before a thread starts.
Batch ``b`` is loaded in order, goes to target worker ``b % M`` and to drafter ``b % N``, so a
run's arithmetic does not depend on which thread was faster.
"""
