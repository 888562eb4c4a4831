"""KV blocks: who holds each block, which blocks hold a known prefix, and what changed among them."""
