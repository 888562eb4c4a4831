"""Models: configuration read from a checkpoint, the decoder, its weights."""
