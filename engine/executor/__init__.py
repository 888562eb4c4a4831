"""What computes an engine's steps: one process so far."""
