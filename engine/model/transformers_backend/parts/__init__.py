"""Parts of a model of transformers that compute what a layer of Baton computes, replaced by that layer.

A part is told by its numbers: it is run in float32 with samples of all sizes, at eight positions from the first to the
last of the context, and one of our layers takes its place only where it says the same. Parts that no layer of ours says
the same as stay as they are. In 16 bits both are rounded, and not everywhere alike: some models rotate in float32, ours
never do.
"""
