"""The decode role: workers whose requests arrive with the KV of their prompt elsewhere."""
