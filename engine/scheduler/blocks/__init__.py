"""KV blocks: who holds which, which hold a known prefix, and what changed among them."""
