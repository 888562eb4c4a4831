"""Device services: memory for the KV cache, copies to and from it, graph capture, CPU cores."""
