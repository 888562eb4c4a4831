"""Logits processors: the changes of logits that requests ask for, one file each."""
