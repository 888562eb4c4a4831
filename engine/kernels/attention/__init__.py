"""Attention on CPUs, compiled: of single queries and of runs of tokens, over the blocks of a paged cache."""
