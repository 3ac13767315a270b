"""The drafter: pure tensor code. Imports torch and floor 0, nothing else of dflash.

Shape letters, the same in every file of this package (and wherever a name carries a suffix):

    T  context positions of one packed batch      N  anchors, one block each
    B  slots per block, the anchor included       Q  drafted slots, N * B
    S  readable positions, T + Q                  R  rows that reach the head, N * (B - 1)
    D  hidden size                                K  taps
    C  features width, K * D                      V  vocabulary
    H  query heads                                G  key/value heads
    I  query tiles of the block mask              J  key tiles of the block mask
    b  batch rows (1 in training)                 d  head size
"""
