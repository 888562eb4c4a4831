"""Attention over the paged KV cache: one Protocol, one file per backend."""
