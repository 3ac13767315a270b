"""Conversations and text -> token rows with a loss mask -> packed batches of exactly T positions.

Sources are read by ``sources`` and ``rows``, turned into tokens by ``chat`` and ``encode``, kept in
``shards``, written by ``prepare``; ``packing`` decides which rows share a batch, ``batch`` fills
one. Nothing here knows a model, only a tokenizer.
"""
