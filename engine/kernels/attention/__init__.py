"""Compiled attention for CPUs over the blocks of a paged cache: for single queries and for runs of tokens."""
