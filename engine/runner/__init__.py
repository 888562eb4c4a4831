"""Runs one step of the model: input batch, KV cache, sampling."""
