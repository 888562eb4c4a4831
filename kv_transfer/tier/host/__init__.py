"""The host-memory tier: blocks that the prefix cache evicted, kept in main memory and loaded back by content."""
