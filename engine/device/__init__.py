"""What a device gives: memory for the KV cache, copies to and from it, graphs."""
