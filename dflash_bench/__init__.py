"""Measures dflash: `drafter_step`, `block_mask` and `pipeline` are commands (docs/benches.md)."""
