"""What all tiers of evicted blocks share: the table of slots and their content, and loads back into the KV cache."""
