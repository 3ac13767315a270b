"""The frozen target: load it, tap its layers, stop after the last tap, never cross documents.

Shape legend: T positions of a packed batch, D hidden, K taps, C = K*D features width,
V rows of the embedding table, H query heads, G key-value heads, E head dimension,
R rows of a generation batch.
"""
