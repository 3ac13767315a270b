"""A folder that a watched program has on its PYTHONPATH until its first line runs.

What is in here runs inside other people's processes: the standard library only, no dflash.
"""
