"""Models computed by their own code in transformers, with Baton's paged attention, products and experts in it.

Imported only for checkpoints that are served this way: transformers is an optional dependency.
"""
