"""Records made visible: progress on a terminal or as lines, TensorBoard, the learning curve.

Nothing here computes a figure; it shows what a record holds. What is shown is talk, so it goes to
stderr unless a caller says otherwise.
"""
