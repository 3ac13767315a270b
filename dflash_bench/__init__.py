"""Measures dflash. Every file is a case: a pytest-benchmark test, a command, or both."""
