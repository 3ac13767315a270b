"""Train DFlash speculative-decoding drafters, diagnose what breaks, measure what is fast."""

__version__ = "0.1.0"
