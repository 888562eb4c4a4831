"""Several sources of KV asked in order, as one connector."""
