"""Pure functions that place a request: which workers prefill and decode it, by predictions for every worker."""
