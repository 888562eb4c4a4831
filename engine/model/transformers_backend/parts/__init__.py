"""Parts of a model of transformers that compute what a layer of Baton computes, replaced by that layer.

A part is told by its numbers: it is run in float32 with samples and with positions from all of the context, and one of
our layers takes its place only where it says the same. What no layer of ours says the same as stays as it is.
"""
