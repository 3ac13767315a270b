"""Measures dflash: ``dflash bench``, and ``pytest dflash_bench`` (docs/benches.md)."""
