"""The decode role: an engine whose requests arrive with the KV of their prompt elsewhere."""
