"""Puts Baton's layers in place of the parts of a transformers model that compute the same.

A part is identified by its results. It runs in float32 on samples of all magnitudes, at eight positions from the first
to the last of the context. One of our layers replaces it only if their results agree; all other parts stay. In 16 bits
both round, not always at the same places: some models rotate in float32, ours never do.
"""
